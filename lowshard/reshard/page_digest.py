"""`digest_pages`: one value for what a sequence of a paged cache holds, whatever its pages, ranks and order of dims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import brief, instance, items, kind_of, mapping, wholes
from lowshard.comm import Communicator, loopback
from lowshard.comm.agreement import agree, control_of, share
from lowshard.content_hash import tensor_digest, text_digest
from lowshard.errors import BufferMismatchError, LayoutError, MeshError, PlanError, VerificationError
from lowshard.foreign_array import READ_ONLY, view_of
from lowshard.kernels.unit_weights import SUMS
from lowshard.reshard.page_plan import plan_pages, tokens_text
from lowshard.reshard.paged_layout import PagedLayout
from lowshard.transfer.page_copy import PagedArray, fragments
from lowshard.transfer.rounds import FirstError

Array = Any
Arrays = Mapping[str, Any]


def digest_pages(
    layout: PagedLayout,
    sequences: Mapping[str, tuple[Iterable[int], int]],
    arrays: Arrays | None,
    comm: Communicator | None = None,
) -> dict[str, str]:
    """Return one value for what each sequence of a paged cache holds, whatever its pages, ranks and order of dims.

    Collective: all ranks of the communicator call this, with equal layouts, sequences and names. The tokens are read
    once; some bytes a sequence travel. Taken before and after `move_pages`, it says whether what is served is what was
    computed, also where a rank gave what is not its own. Replicas are compared.

    Args:
        layout: of the cache.
        sequences: by name: its pages and its tokens.
        arrays: this rank's arrays by name; None on a rank without any.
        comm: the communicator; None for one rank.

    Returns:
        By sequence, 32 hexadecimal digits.

    Every rank raises the same error.

    Raises:
        VerificationError: ranks with the same heads hold different bits; it names a sequence and the ranks.
        PlanError, BufferMismatchError, MeshError, MismatchError: as `plan_pages` and `move_pages`.
    """
    if comm is None:
        with loopback(1)[0] as alone:
            return digest_pages(layout, sequences, arrays, alone)
    control = control_of(comm)
    errors = FirstError()
    found: _Weighed | None = errors.guard(_Weighed, layout, sequences, arrays, comm)
    said = b"" if found is None else text_digest(found.said)
    agree(comm, said, errors.take(), "digest_pages", None if found is None else found.words)
    assert found is not None  # else all ranks have raised
    rows = [row.reshape(found.sums.shape) for row in share(control, found.sums.reshape(-1))]
    return found.result(rows)


class _Weighed:
    """The sums of a rank's part of each sequence."""

    def __init__(self, layout: object, sequences: object, arrays: object, comm: Communicator) -> None:
        self._layout = known = instance(layout, PagedLayout, "layout is a PagedLayout", LayoutError)
        if max(known.ranks) >= comm.size:
            raise MeshError(f"the layout has rank {max(known.ranks)}, the communicator {comm.size} ranks")
        rule = "sequences are a mapping of names to (pages, tokens)"
        given = {}
        for name, row in mapping(sequences, rule, PlanError).items():
            pair = items(row, f"{rule}: {brief(name)}", PlanError)
            if len(pair) != 2:
                raise PlanError(f"{rule}: {brief(name)} has {brief(pair)}")
            pages = wholes(pair[0], f"{rule}: {brief(name)}", PlanError)
            given[name] = pages, pair[1]
        # checked alone: a digest may be of sequences that share what they like
        self._tables = {
            name: plan_pages(known, known, {name: (pages, pages, tokens)}).sequences[0]
            for name, (pages, tokens) in given.items()
        }
        held = checked_arrays(arrays, known, comm, "cache")
        self._names = sorted(held)
        self.said = json.dumps(
            [known.to_json(), [[s.name, s.src_pages, s.tokens] for s in self._tables.values()]]
        )
        count = np.array([len(self._names)], np.int64)
        self.sums = np.zeros((len(self._tables) + 1, SUMS), np.uint32)
        text = json.dumps(self._names).encode()
        self.sums[-1] = count[0], int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
        if not held:
            return
        first = known.heads_of(comm.rank)[0]
        for row, sequence in zip(self.sums, self._tables.values(), strict=False):
            parts = fragments([(sequence.src_pages, sequence.tokens)], known.page_tokens)
            size = sequence.tokens * known.heads * known.token_elems
            for number, name in enumerate(self._names):
                array = PagedArray(held[name], known.dims)
                row += array.weigh(parts, sequence.tokens, first, known.heads, number * size)

    def words(self) -> str:
        """Return what is weighed, for a message about ranks that ask for different things."""
        return f"{self._layout}, {tokens_text(self._tables.values())}"

    def result(self, rows: list[npt.NDArray[np.uint32]]) -> dict[str, str]:
        """Return the digests, from the sums of all ranks; the same on all."""
        ranks = self._layout.ranks
        first = rows[ranks[0]][-1]
        for rank in ranks:
            if (rows[rank][-1] != first).any():
                raise BufferMismatchError(
                    f"the arrays of all ranks have the same names, those of ranks {ranks[0]} and {rank} differ"
                )
        sequences = [(s.name, s.tokens) for s in self._tables.values()]
        return digests_of(self._layout, sequences, [row[:-1] for row in rows], int(first[0]))


def digests_of(
    layout: PagedLayout,
    sequences: Sequence[tuple[str, int]],
    rows: Sequence[npt.NDArray[np.uint32]],
    arrays: int,
) -> dict[str, str]:
    """Return the digests of sequences from the sums of all ranks.

    Args:
        layout: who holds which heads.
        sequences: names and tokens.
        rows: by rank of the communicator, uint32 [sequences, SUMS].
        arrays: how many a rank has.

    Raises:
        VerificationError: ranks with the same heads hold different bits.
    """
    total = np.zeros_like(rows[0])
    for part in range(layout.parts):
        ranks = layout.holders(part)
        total += rows[ranks[0]]
        for rank in ranks[1:]:
            apart = np.flatnonzero((rows[rank] != rows[ranks[0]]).any(axis=1))
            if len(apart):
                raise VerificationError(
                    f"ranks with the same heads hold the same bits; sequence {brief(sequences[apart[0]][0])} differs "
                    f"on ranks {ranks[0]} and {rank}"
                )
    return {
        name: tensor_digest(
            layout.dtype, (arrays, layout.layers, layout.kinds, tokens, layout.heads, layout.head_dim), row
        )
        for (name, tokens), row in zip(sequences, total, strict=True)
    }


def checked_arrays(
    given: object, layout: PagedLayout, comm: Communicator, which: str, *, written: bool = False
) -> dict[str, Array]:
    """Return this rank's arrays by name; none where it is not of the layout.

    Raises:
        BufferMismatchError: one has another shape or dtype than the layout says, or there are none.
    """
    if comm.rank not in layout.ranks:
        if given is not None:
            raise BufferMismatchError(
                f"rank {comm.rank} is none of the {which}'s {brief(layout.ranks)}, so it passes None"
            )
        return {}
    rule = f"{which} arrays are a mapping of names to arrays"
    shape, row, xp = layout.local_shape(comm.rank), dtypes.get(layout.dtype), comm.xp
    found = {}
    for name, value in mapping(given, rule, BufferMismatchError).items():
        instance(name, str, f"{rule}, and a name is text", BufferMismatchError)
        array = view_of(value, f"{which} {name}")
        if not isinstance(array, xp.ndarray):
            raise BufferMismatchError(f"{which} {name}: is a {xp.__name__} array, got {kind_of(array)}")
        if tuple(array.shape) != shape or array.dtype != row.in_memory(xp):
            raise BufferMismatchError(
                f"{which} {name}: rank {comm.rank} holds {row.name}{list(shape)} of {layout}, got "
                f"{array.dtype}{list(array.shape)}"
            )
        if written and xp is np and not array.flags.writeable:
            raise BufferMismatchError(f"{which} {name}: {READ_ONLY}")
        found[name] = array
    if not found:
        raise BufferMismatchError(f"{rule}, at least one, got none")
    return found
