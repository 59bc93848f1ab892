"""Moves pages of key-value caches as a plan says: one message a pair of ranks, checked before a page is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.argument import brief, instance, mapping
from lowshard.box import full_box
from lowshard.comm import Communicator
from lowshard.comm.agreement import agree, control_of, share, share_text
from lowshard.content_hash import text_digest
from lowshard.errors import BufferMismatchError, MeshError, PlanError, VerificationError
from lowshard.foreign_array import host_of
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS
from lowshard.reshard.page_digest import checked_arrays, digests_of
from lowshard.reshard.page_plan import PagePair, PagePlan, tokens_text
from lowshard.reshard.paged_layout import PagedLayout
from lowshard.transfer.page_copy import PagedArray, fragments
from lowshard.transfer.rounds import FirstError, Letter, Mail

Array = Any
Arrays = Mapping[str, Any]
_HEAD_WORDS = 8
"""uint64 in front of a message: the plan (2), sender, receiver, first and last head, and two sums of the payload."""
_HEAD_BYTES = 8 * _HEAD_WORDS
_WHAT = "move_pages"


@dataclass(frozen=True)
class PageReport:
    """What one rank moved."""

    messages: int
    """Sent, one for each rank that was given anything."""
    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    """That stayed on the rank."""


def move_pages(
    plan: PagePlan, src: Arrays | None, dst: Arrays | None, comm: Communicator,
    digests: Mapping[str, str] | None = None,
) -> PageReport:  # fmt: skip
    """Move sequences from pages of some ranks into pages of others.

    Collective: all ranks of the communicator call this, with equal plans and the same names. Each rank packs what
    another gets of all sequences and arrays into one message. A message says who sends which heads of which plan to
    whom, with sums of its bits; nothing is written before every rank has found its messages to be right. Pages that no
    sequence fills stay as they are; source and destination may be the same arrays. Memory beside the arrays: what the
    rank sends and gets.

    Args:
        plan: from `plan_pages`; equal on all ranks.
        src: this rank's source arrays by name ("k" and "v", say, or one for each layer), each of
            `plan.src.local_shape(rank)`; None on a rank without any.
        dst: its destination arrays under the same names, of `plan.dst.local_shape(rank)`; None on a rank without
            any.
        comm: a communicator that has every rank of the plan.
        digests: by sequence what it is to hold, from `digest_pages`, equal on all ranks; then also a rank that gives
            what is not its own is found before a page is written. None compares no contents.

    Every rank raises the same error, before a page is written.

    Raises:
        MismatchError: ranks pass different plans, or other names.
        BufferMismatchError: an array is missing, or has another shape or dtype than its layout says.
        MeshError: the communicator lacks ranks of the plan.
        VerificationError: a message is of another sender, receiver or plan than it should be, or its bits are damaged,
            or a sequence would hold another content than `digests` says.
        PeerFailed, TimedOut: a rank did not come.
    """
    control_of(comm)
    errors = FirstError()
    side: _Side | None = errors.guard(_Side, plan, src, dst, comm, digests)
    said = text_digest("" if side is None else side.said)
    agree(comm, said, errors.take(), _WHAT, None if side is None else side.words)
    assert side is not None  # else all ranks have raised
    report = side.move(errors)
    agree(comm, b"", errors.take(), _WHAT)
    side.compare_contents()
    side.unpack()
    return report


class _Side:
    """What one rank has to do with a plan."""

    def __init__(self, plan: object, src: object, dst: object, comm: Communicator, digests: object) -> None:
        self._plan = found = instance(plan, PagePlan, "plan is a PagePlan, from plan_pages", PlanError)
        if found.world_size > comm.size:
            raise MeshError(
                f"the plan has ranks up to {found.world_size - 1}, but the communicator has {comm.size}; "
                f"start {found.world_size} ranks, as `lowshard run -n {found.world_size}` does"
            )
        self._comm = comm
        self._src = checked_arrays(src, found.src, comm, "source")
        self._dst = checked_arrays(dst, found.dst, comm, "destination", written=True)
        if self._src and self._dst and self._src.keys() != self._dst.keys():
            raise BufferMismatchError(
                f"source and destination arrays have the same names, got {brief(sorted(self._src))} and "
                f"{brief(sorted(self._dst))}"
            )
        self.names = sorted(self._src or self._dst or ())
        self._right = _expected(digests, found)
        self.said = json.dumps([found.digest(), self._right], sort_keys=True)
        rank = comm.rank
        pairs = found.pairs if found.tokens else ()
        self._gives = [p for p in pairs if p.src_rank == rank != p.dst_rank]
        self._takes = [p for p in pairs if p.dst_rank == rank != p.src_rank]
        self._keeps = [p for p in pairs if p.src_rank == rank == p.dst_rank]
        self._from = fragments([(s.src_pages, s.tokens) for s in found.sequences], found.src.page_tokens)
        self._to = fragments([(s.dst_pages, s.tokens) for s in found.sequences], found.dst.page_tokens)
        self._came: list[tuple[PagePair, Array]] = []
        self._count = 0

    def words(self) -> str:
        """Return what moves, for a message about ranks that hold different plans."""
        plan, right = self._plan, "" if self._right is None else ", with digests"
        return f"{plan.src} to {plan.dst}, {tokens_text(plan.sequences)}{right}"

    def move(self, errors: FirstError) -> PageReport:
        """Pack, send and take everything, and compare it; write no page.

        Collective: all ranks of the communicator call this.
        """
        comm, plan = self._comm, self._plan
        count = self._count = self._agree_on_names()
        sizes = {
            p: _HEAD_BYTES + -(-count * plan.pair_bytes(p) // 8) * 8 for p in (*self._gives, *self._takes)
        }
        out, into = (
            comm.xp.zeros(sum(sizes[p] for p in found), np.uint8) for found in (self._gives, self._takes)
        )
        sends, receives = _letters(self._gives, sizes, False), _letters(self._takes, sizes, True)
        mail = Mail(comm, (out, out), (into, into), [sends], [receives])
        mail.make_room(0)
        for pair, letter in zip(self._gives, sends, strict=True):
            errors.guard(self._fill, pair, out[letter.start : letter.stop])
        mail.send(0)
        for pair in self._keeps:
            kept = comm.xp.zeros(count * plan.pair_bytes(pair), np.uint8)
            errors.guard(self._pack, pair, kept)
            self._came.append((pair, kept))
        came = mail.take(0)
        for pair in self._takes:
            errors.guard(self._compare, pair, came[pair.src_rank])
            self._came.append((pair, came[pair.src_rank][_HEAD_BYTES:]))
        mail.finish()
        moved = [
            count * sum(map(plan.pair_bytes, found)) for found in (self._gives, self._takes, self._keeps)
        ]
        return PageReport(len(self._gives), *moved)

    def compare_contents(self) -> None:
        """Compare what the sequences will hold with what they are to hold, where that was said.

        Collective: all ranks of the communicator call this.

        Raises:
            VerificationError: one would hold something else; on every rank.
        """
        if self._right is None:
            return
        plan, count = self._plan, len(self.names)
        sums = np.zeros((len(plan.sequences), SUMS), np.uint32)
        for pair, packed in self._came:
            heads, before = pair.heads[1] - pair.heads[0], 0
            inner = (plan.src.layers, plan.src.kinds, plan.tokens, heads, plan.src.head_dim)
            held = packed[: count * plan.pair_bytes(pair)].reshape(count, *inner[:-1], -1)
            for row, sequence in zip(sums, plan.sequences, strict=True):
                part = held[:, :, :, before : before + sequence.tokens].view(plan.src.unit)
                whole = (count, *inner[:2], sequence.tokens, plan.src.heads, plan.src.head_dim)
                box = full_box(whole)
                row += content_sum(part, (*box[:4], pair.heads, *box[5:]), whole)
                before += sequence.tokens
        rows = [row.reshape(sums.shape) for row in share(self._comm.control, sums.reshape(-1))]
        found = digests_of(plan.dst, [(s.name, s.tokens) for s in plan.sequences], rows, self._count)
        for name, right in self._right.items():
            if found[name] != right:
                raise VerificationError(
                    f"sequence {brief(name)}: what came for it has the digest {found[name]}, it is to have {right}: a "
                    "rank gave pages or heads that are not its own; nothing was written"
                )

    def unpack(self) -> None:
        """Write what came into pages."""
        for pair, packed in self._came:
            at = 0
            for name in self.names:
                size = self._plan.pair_bytes(pair)
                array = PagedArray(self._dst[name], self._plan.dst.dims)
                array.unpack(self._to, _local(self._plan.dst, pair.dst_rank, pair), packed[at : at + size])
                at += size

    def _agree_on_names(self) -> int:
        """Return how many arrays a rank has; all that have any have the same."""
        mine = np.zeros(2, np.int64)
        if self._src or self._dst:
            text = json.dumps(self.names).encode()
            mine[:] = len(self.names), int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        rows: list[tuple[int, ...]] = [tuple(row.tolist()) for row in share(self._comm.control, mine)]
        holders = sorted({*self._plan.src.ranks, *self._plan.dst.ranks})
        first = rows[holders[0]]
        other = next((r for r in holders if rows[r] != first), None)
        if other is not None:
            names = [
                brief(json.loads(text)) for text in share_text(self._comm.control, json.dumps(self.names))
            ]
            error = BufferMismatchError(
                f"the arrays of all ranks have the same names: rank {holders[0]} has {names[holders[0]]}, rank {other} "
                f"{names[other]}"
            )
            agree(self._comm, b"", error, _WHAT)
        return first[0]

    def _fill(self, pair: PagePair, room: Array) -> None:
        self._pack(pair, room[_HEAD_BYTES:])
        room[:_HEAD_BYTES] = self._comm.xp.asarray(self._head(pair, room[_HEAD_BYTES:]).view(np.uint8))

    def _pack(self, pair: PagePair, room: Array) -> None:
        at, size = 0, self._plan.pair_bytes(pair)
        for name in self.names:
            array = PagedArray(self._src[name], self._plan.src.dims)
            array.pack(self._from, _local(self._plan.src, pair.src_rank, pair), room[at : at + size])
            at += size

    def _head(self, pair: PagePair, payload: Array) -> npt.NDArray[np.uint64]:
        words = bytes.fromhex(self._plan.digest())
        sums = content_sum(payload, ((0, payload.size),), (payload.size,))
        named = np.array([pair.src_rank, pair.dst_rank, *pair.heads, *sums], np.uint64)
        return np.concatenate([np.frombuffer(words, np.uint64), named])

    def _compare(self, pair: PagePair, came: Array) -> None:
        head = host_of(came[:_HEAD_BYTES])
        got, right = head.copy().view(np.uint64), self._head(pair, came[_HEAD_BYTES:])
        if (got == right).all():
            return
        rank = self._comm.rank
        says = f"rank {int(got[2])} to rank {int(got[3])}, heads {int(got[4])} to {int(got[5])}"
        if (got[:2] != right[:2]).any():
            what = "is of another plan"
        elif (got[2:6] != right[2:6]).any():
            what = (
                f"says that it is from {says}; expected is rank {pair.src_rank} to rank {rank}, heads {pair.heads[0]} "
                f"to {pair.heads[1]}"
            )
        else:
            what = "is damaged: the sums of its bits differ"
        raise VerificationError(
            f"pages: the message of rank {pair.src_rank} to rank {rank} {what}; nothing was written"
        )


def _expected(digests: object, plan: PagePlan) -> dict[str, str] | None:
    """Return the digests that were given, checked."""
    if digests is None:
        return None
    rule = "digests are a mapping of the plan's sequences to what digest_pages returned for them"
    found = {str(k): instance(v, str, rule, PlanError) for k, v in mapping(digests, rule, PlanError).items()}
    known = {s.name for s in plan.sequences}
    if found.keys() != known:
        raise PlanError(f"{rule}; the plan has {brief(sorted(known))}, got {brief(sorted(found))}")
    return found


def _local(layout: PagedLayout, rank: int, pair: PagePair) -> tuple[int, int]:
    """Return a pair's heads as a rank's array counts them."""
    first = layout.heads_of(rank)[0]
    return pair.heads[0] - first, pair.heads[1] - first


def _letters(pairs: list[PagePair], sizes: Mapping[PagePair, int], comes: bool) -> list[Letter]:
    made, at = [], 0
    for pair in pairs:
        made.append(Letter(pair.src_rank if comes else pair.dst_rank, at, at + sizes[pair]))
        at += sizes[pair]
    return made
