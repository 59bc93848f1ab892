"""A checkpoint as a chain of deltas makes it: read box by box, and compared with all that the deltas say before."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, row_major_parts, shape_of
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, StoredTensor
from lowshard.checkpoint.delta_file import Delta, Patch, chain_of
from lowshard.comm import Communicator, share_text
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS
from lowshard.nearest import nearest

_PART_BYTES = 4 << 20
ALONE = 4


class PatchedSource:
    """What the deltas of a chain make of a checkpoint."""

    def __init__(
        self, source: ByteSource, deltas: Sequence[Delta], most_bytes: int, advance: Callable[[int], None]
    ) -> None:
        self._source, self._deltas, self._most_bytes = source, tuple(deltas), most_bytes
        self._advance = advance
        self._kept: OrderedDict[str, tuple[Patch, ...]] = OrderedDict()
        self._kept_bytes = 0
        self.chain: tuple[Delta, ...] = ()
        self.digests: dict[str, str] = {}

    def check(self, comm: Communicator, together: Callable[[Callable[[], None]], None]) -> None:
        """Compare the base, every link and every tensor of the result with what the deltas say."""
        catalog = self._source.catalog
        base = catalog.digests
        mine: dict[str, str] = {}
        own = self._own(comm.rank, comm.size)

        def look_at_base() -> None:
            for name in own:
                mine[name] = self._digest_of(name)

        if base is None:
            together(look_at_base)
            base = self._shared(comm, mine)
        known = base

        def find_chain() -> None:
            self.chain = chain_of(self._deltas, model_digest(known), catalog.where)

        together(find_chain)
        made: dict[str, str] = {}

        def look_at_changes() -> None:
            for name in own:
                if any(name in delta.tensors for delta in self.chain):
                    made[name] = self._check_tensor(name, catalog.tensors[name])

        together(look_at_changes)
        self.digests = base | self._shared(comm, made)

        def compare_whole() -> None:
            last = self.chain[-1]
            found = model_digest(self.digests)
            if found != last.digest:
                raise CheckpointError(
                    f"{last.where}: makes a model of the digest {last.digest}, and what comes out has {found}: a delta "
                    "of the chain is not what it was made as"
                )

        together(compare_whole)

    def most_checked_bytes(self, rank: int, size: int) -> int:
        """Return how many bytes of the base a rank may read to compare."""
        tensors = self._source.catalog.tensors
        reads_base = bool(self._deltas) and self._source.catalog.digests is None
        passes = {
            name: reads_base + any(name in delta.tensors for delta in self._deltas)
            for name in self._own(rank, size)
        }
        return sum(n * part.entry.size_bytes for name, n in passes.items() for part in tensors[name].parts)

    def _own(self, rank: int, size: int) -> list[str]:
        return list(self._source.catalog.tensors)[rank::size]

    def apply(self, name: str, box: Box, values: np.ndarray) -> None:
        """Turn a box of the base, in a contiguous array, into the same of the result."""
        for patch in self._patches(name):
            patch.apply(values, box)

    def _patches(self, name: str) -> tuple[Patch, ...]:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        tensor = self._source.catalog.tensors[name]
        found: tuple[Patch, ...] = ()
        for number, delta in enumerate(self.chain):
            if name in delta.tensors:
                found = (*found, delta.patch(name, tensor.dtype, tensor.shape))
            if _bytes_of(found) > ALONE * self._most_bytes:
                raise CheckpointError(
                    f"{delta.where}: tensor {name!r}: what the first {number + 1} deltas change of it takes "
                    f"{_bytes_of(found) / 1e6:.0f} MB, and there is room for {ALONE * self._most_bytes / 1e6:.0f} MB: "
                    "apply fewer deltas at a time, one result on the other, or give more memory"
                )
        self._kept[name] = found
        self._kept_bytes += _bytes_of(found)
        while self._kept_bytes > self._most_bytes and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return found

    def _digest_of(self, name: str) -> str:
        tensor = self._source.catalog.tensors[name]
        sums = np.zeros(SUMS, np.uint32)
        for box, values in self._parts(name, tensor):
            sums += content_sum(values, box, tensor.shape)
        return tensor_digest(tensor.dtype, tensor.shape, sums)

    def _parts(self, name: str, tensor: StoredTensor) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield a tensor of the base in parts, row-major."""
        row = dtypes.get(tensor.dtype)
        boxes = row_major_parts(full_box(tensor.shape), max(1, _PART_BYTES // row.itemsize_bytes))
        for box in boxes if prod(tensor.shape) else ():
            values = np.empty(shape_of(box), row.numpy)
            self._source.read(name, box, values)
            self._advance(values.nbytes)
            yield box, values

    def _check_tensor(self, name: str, tensor: StoredTensor) -> str:
        """Compare a tensor's base and what each link makes of it; return the digest of the last."""
        links = [delta for delta in self.chain if name in delta.tensors]
        patches = self._patches(name)
        sums = np.zeros((len(links) + 1, SUMS), np.uint32)
        for box, values in self._parts(name, tensor):
            sums[0] += content_sum(values, box, tensor.shape)
            for patch, total in zip(patches, sums[1:], strict=True):
                patch.apply(values, box)
                total += content_sum(values, box, tensor.shape)
        digests = [tensor_digest(tensor.dtype, tensor.shape, row) for row in sums]
        if tensor.digest not in (None, digests[0]):
            raise CheckpointError(
                f"{self._source.catalog.where}: tensor {name!r}: its data is damaged: its digest is {digests[0]}, the "
                f"index says {tensor.digest}"
            )
        for delta, before, after in zip(links, digests, digests[1:], strict=False):
            _compare(delta, name, before, after)
        return digests[-1]

    @staticmethod
    def _shared(comm: Communicator, mine: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in share_text(comm.control, json.dumps(dict(mine))):
            found |= json.loads(text)
        return found


def check_deltas(deltas: Sequence[Delta], catalog: Catalog, memory_bytes: int) -> None:
    """Compare what deltas change with the tensors there are."""
    for delta in deltas:
        for name in delta.tensors:
            tensor = catalog.tensors.get(name)
            if tensor is None:
                raise CheckpointError(
                    f"{delta.where}: tensor {name!r}: the delta changes it, and {catalog.where} has none of that name"
                    f"{nearest(name, catalog.tensors)}"
                )
            delta.check_tensor(name, tensor.dtype, tensor.shape)
            need_bytes = 3 * prod(tensor.shape) * dtypes.get(tensor.dtype).itemsize_bytes
            if need_bytes > memory_bytes:
                raise CheckpointError(
                    f"{delta.where}: tensor {name!r}: changing it takes up to {need_bytes / 1e6:.0f} MB, --memory is "
                    f"{memory_bytes / 1e6:.0f} MB"
                )


def _compare(delta: Delta, name: str, before: str, after: str) -> None:
    changed, where = delta.tensors[name], f"{delta.where}: tensor {name!r}"
    if changed.base != before:
        raise CheckpointError(
            f"{where}: the delta stands on a content of the digest {changed.base}, what it was to be applied to has "
            f"{before}: another base"
        )
    if changed.digest != after:
        raise CheckpointError(
            f"{where}: the delta makes a content of the digest {changed.digest}, and what comes out has {after}: the "
            "delta is damaged"
        )


def _bytes_of(patches: Sequence[Patch]) -> int:
    return sum(patch.size_bytes for patch in patches)
