"""`load`: walks a load plan. Reads go straight into their place; what others need is handed out in rounds."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, intersect, relative_slices, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files
from lowshard.checkpoint.checksum import Tally
from lowshard.comm import Communicator, agree, share_text
from lowshard.errors import CheckpointError, LowshardError, PlanError
from lowshard.tiling import Tiling
from lowshard.weights.delivery import Delivery
from lowshard.weights.plan import LoadPlan, Read
from lowshard.weights.verify import Verification

Progress = Callable[[int, int], None]

_BLOCK_BYTES = 64 << 20
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class LoadReport:
    """What one rank did, to hold against its plan."""

    read_bytes: int
    sent_bytes: int
    verified_bytes: int


def load(
    files: Files | Catalog,
    plan: LoadPlan,
    comm: Communicator | None = None,
    *,
    verify: bool = True,
    progress: Progress | None = None,
    reports: list[LoadReport] | None = None,
) -> dict[str, np.ndarray]:
    """Return this rank's arrays, by name, read as the plan says.

    Collective: all ranks of the communicator call this. Beside the arrays a rank needs some 20 MB. Checksums that
    the checkpoint has are compared first, each by one rank, so that no damaged byte is handed out.

    Args:
        files: the checkpoint, as for `Catalog.open`; the one the plan was made for.
        plan: from `plan_load`, equal on every rank (its digest is compared first).
        comm: a communicator of host arrays with the plan's number of ranks; None for a plan of one rank.
        verify: False skips the checksums.
        progress: called on rank 0 with the bytes it has read so far and all it will read.
        reports: if given, what this rank read and sent is appended.

    Returns:
        Arrays of `tiling.local_shape(rank)`; a rank that takes no part in a tiling has no array of that name.

    Raises:
        CheckpointError: a file is missing, damaged, or other than when the plan was made; the text names file and
            tensor.
        PlanError: another number of ranks.
        MismatchError: ranks hold different plans.
        (Each on every rank, whichever rank is at fault.)
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    source: ByteSource | None = None
    try:
        with _Together(comm, bytes.fromhex(plan.digest())):
            if plan.num_ranks != size:
                raise PlanError(f"the plan is for {plan.num_ranks} ranks, the communicator has {size}")
            source = ByteSource(_same_catalog(files, plan))
            check = Verification(plan, source, rank, size)
            job = _Load(plan, rank, source, check.tally if verify else None, progress)
        job.run(comm)
        with _Together(comm):
            if job.error is not None:
                raise job.error
            if verify:
                check.compare_own()
        if verify and check.has_work:
            if comm is not None:
                check.share(comm)
            with _Together(comm):
                check.compare_rest()
        if reports is not None:
            reports.append(LoadReport(job.read_bytes, job.sent_bytes, check.verified_bytes))
        return job.arrays
    finally:
        if source is not None:
            source.close()


def nodes_of(comm: Communicator) -> list[int]:
    """Return the node of each rank, numbered in the order of their lowest ranks.

    Collective: all ranks of the communicator call this.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    names = share_text(comm.control, f"{socket.gethostname()} {boot}")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


class _Together:
    """A block of local work after which all ranks agree: if one failed, all raise its error."""

    def __init__(self, comm: Communicator | None, digest: bytes = b"") -> None:
        self._comm, self._digest = comm, digest

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        found = error
        if isinstance(error, OSError) and not isinstance(error, LowshardError):
            found = CheckpointError(f"loading failed: {error}")
            found.__cause__ = error
        if self._comm is None:
            if found is not None and found is not error:
                raise found
            return
        agree(self._comm, self._digest, found, "load")  # raises if any rank has an error


class _Load:
    """One rank's walk through a plan. What goes wrong on the way is kept: the others wait for this rank."""

    def __init__(
        self, plan: LoadPlan, rank: int, source: ByteSource, tally: Tally | None, progress: Progress | None
    ) -> None:
        self.plan, self.rank = plan, rank
        self.arrays: dict[str, np.ndarray] = {}
        self.read_bytes = self.sent_bytes = 0
        self.error: Exception | None = None
        self._source, self._tally = source, tally
        self._progress = progress if rank == 0 else None
        self._total_bytes = plan.read_bytes(rank)
        self._own = [r for r in plan.reads if r.takers == (rank,) and r.reader == rank]
        self._own_bytes, self._own_at, self._own_done = sum(map(self._bytes, self._own)), 0, 0

    def run(self, comm: Communicator | None) -> None:
        """Make and fill this rank's arrays.

        Collective: all ranks of the communicator call this.
        """
        try:
            self.allocate()
        except MemoryError as error:
            self.error = error
        if comm is None:
            self.read_own(1.0)
            return
        plan = self.plan
        shared = tuple(r for r in plan.reads if any(t != r.reader for t in r.takers))
        members = tuple(range(plan.num_ranks))
        apart = any(plan.nodes[t] != plan.nodes[r.reader] for r in shared for t in r.takers)
        if comm.shows or apart or len(set(plan.nodes)) == 1:
            Delivery(shared, plan.by_name, members).run(self, comm)
            return
        node = plan.nodes[self.rank]
        group = comm.split(node)  # the ranks of a node see each other's memory
        assert group is not None  # every rank is on a node
        with group:
            here = tuple(r for r in members if plan.nodes[r] == node)
            reads = tuple(r for r in shared if plan.nodes[r.reader] == node)
            Delivery(reads, plan.by_name, here).run(self, group)

    def allocate(self) -> None:
        """Make this rank's arrays, in few large blocks: huge pages take a tenth of the faults."""
        block, at = np.empty(0, np.uint8), 0
        left = sum(_padded(t.local_bytes(self.rank)) for _, t in self.plan.tilings)
        for name, tiling in self.plan.tilings:
            if self.rank not in tiling:
                continue
            need = _padded(tiling.local_bytes(self.rank))
            if at + need > block.size:
                block, at = np.empty(max(need, min(left, _BLOCK_BYTES)), np.uint8), 0
            flat = block[at : at + tiling.local_bytes(self.rank)]
            shape, dtype = tiling.local_shape(self.rank), dtypes.get(tiling.dtype).numpy
            self.arrays[name] = flat.view(dtype).reshape(shape)
            at, left = at + need, left - need

    def fetch(self, read: Read, into: np.ndarray) -> None:
        """Fill an array with what this rank reads for others."""
        self._read(read, [(into, read.box)])
        self.sent_bytes += self._bytes(read) * sum(t != self.rank for t in read.takers)

    def place(self, read: Read, block: np.ndarray) -> None:
        """Put what this rank takes where it belongs."""
        if self.error is None:
            for view, box in self._places(read.name, read.box):
                view[...] = block[relative_slices(box, read.box)]

    def read_own(self, share: float) -> None:
        """Read what this rank alone takes into its place, until that share of it is done."""
        while self._own_at < len(self._own) and self._own_done <= share * self._own_bytes:
            read = self._own[self._own_at]
            self._read(read, self._places(read.name, read.box))
            self._own_done += self._bytes(read)
            self._own_at += 1

    def _read(self, read: Read, places: Iterable[tuple[np.ndarray, Box]]) -> None:
        if self.error is not None:
            return
        try:
            for view, box in places:
                self._source.read(read.name, box, view, self._tally)
            self.read_bytes += self._bytes(read)
            if self._progress is not None:
                self._progress(self.read_bytes, self._total_bytes)
        except Exception as error:
            self.error = error

    def _bytes(self, read: Read) -> int:
        return volume(read.box) * self.plan.by_name[read.name].itemsize_bytes

    def _places(self, name: str, box: Box) -> Iterator[tuple[np.ndarray, Box]]:
        """Yield each part of a box that this rank holds: the view of its array, and the box."""
        tiling: Tiling = self.plan.by_name[name]
        array = self.arrays[name]
        for tile in tiling.tiles(self.rank):
            common = intersect(tile.box, box) if box else ()
            if common is None:
                continue
            inside = relative_slices(common, tile.box)
            local = array[relative_slices(tile.local, full_box(array.shape))] if array.ndim else array
            yield (local[inside] if array.ndim else local), common


def _same_catalog(files: Files | Catalog, plan: LoadPlan) -> Catalog:
    catalog = files if isinstance(files, Catalog) else Catalog.open(files)
    if catalog.digest != plan.source:
        for name, tiling in plan.tilings:
            stored = catalog.tensor(name)
            if (stored.dtype, stored.shape) != (tiling.dtype, tiling.shape):
                raise CheckpointError(
                    f"{stored.parts[0].file if stored.parts else catalog.where}: tensor {name!r} is "
                    f"{stored.dtype}{list(stored.shape)}, the plan is for {tiling.dtype}{list(tiling.shape)}"
                )
        raise CheckpointError(
            f"{catalog.where}: its tensors lie otherwise than when the plan was made: make it anew with plan_load"
        )
    return catalog


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
