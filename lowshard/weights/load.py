"""`load`: walks a load plan. Reads go straight into their place; what others need travels in bounded rounds."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, intersect, relative_slices, shape_of, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files
from lowshard.comm import Communicator, agree, share_text
from lowshard.errors import CheckpointError, LowshardError, PlanError
from lowshard.tiling import Tiling
from lowshard.weights.plan import CHUNK_BYTES, LoadPlan, Read

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
    job = _Load(plan, rank, progress)
    source: ByteSource | None = None
    try:
        with _Together(comm, bytes.fromhex(plan.digest())):
            if plan.num_ranks != size:
                raise PlanError(f"the plan is for {plan.num_ranks} ranks, the communicator has {size}")
            source = ByteSource(_same_catalog(files, plan))
        assert source is not None
        with _Together(comm):
            if verify:
                job.verify(source, size)
            job.allocate()
            job.read_own(source)
        rounds = list(_rounds(plan))
        for reads in rounds:
            assert comm is not None  # a plan of one rank sends nothing
            job.exchange(reads, source, comm)
        if rounds:
            with _Together(comm):
                if job.shared_error is not None:
                    raise job.shared_error
        if reports is not None:
            reports.append(LoadReport(job.read_bytes, job.sent_bytes, job.verified_bytes))
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
        if self._comm is None or (error is not None and not isinstance(error, Exception)):
            return
        if isinstance(error, OSError) and not isinstance(error, LowshardError):
            error = CheckpointError(f"loading failed: {error}")
        agree(self._comm, self._digest, error, "load")  # raises if any rank has an error


class _Load:
    """One rank's walk through a plan."""

    def __init__(self, plan: LoadPlan, rank: int, progress: Progress | None) -> None:
        self.plan, self.rank = plan, rank
        self.arrays: dict[str, np.ndarray] = {}
        self.read_bytes = self.sent_bytes = self.verified_bytes = 0
        self.shared_error: Exception | None = None
        self._progress = progress if rank == 0 else None
        self._total_bytes = plan.read_bytes(rank) if self._progress else 0

    def verify(self, source: ByteSource, size: int) -> None:
        """Compare this rank's part of the checksums of all stored arrays that the plan touches."""
        load_bytes = [0] * size
        seen: set[tuple[str, int]] = set()
        for name, _ in self.plan.tilings:
            for part in source.catalog.tensor(name).parts:
                if part.crc32 is None or (part.file, part.entry.start) in seen:
                    continue
                seen.add((part.file, part.entry.start))
                turn = load_bytes.index(min(load_bytes))
                load_bytes[turn] += part.entry.size_bytes
                if turn == self.rank:
                    self.verified_bytes += source.verify(name, part)

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

    def read_own(self, source: ByteSource) -> None:
        """Read what this rank alone takes, and what it shares, into its own place."""
        mine = [r for r in self.plan.reads if r.reader == self.rank and self.rank in r.takers]
        for read in mine:
            for view, box in self._places(read.name, read.box):
                source.read(read.name, box, view)
            self._count(read)

    def exchange(self, round_: list[Read], source: ByteSource, comm: Communicator) -> None:
        """Send what this rank read for others in one round, and place what comes."""
        counts_out, counts_in = [0] * comm.size, [0] * comm.size
        sends: list[tuple[int, Read]] = []
        takes: list[tuple[int, Read]] = []
        for read in round_:
            size_bytes = volume(read.box) * self.plan.by_name[read.name].itemsize_bytes
            for taker in read.takers:
                if taker == read.reader:
                    continue
                if read.reader == self.rank:
                    counts_out[taker] += size_bytes
                    sends.append((taker, read))
                elif taker == self.rank:
                    counts_in[read.reader] += size_bytes
                    takes.append((read.reader, read))
        send, displs_out = _buffer(counts_out)
        recv, displs_in = _buffer(counts_in)
        try:
            self._pack(sends, displs_out, send, source)
        except (CheckpointError, OSError) as error:  # the others are waiting in the exchange
            self.shared_error = self.shared_error or error
        comm.all_to_all_v(send, counts_out, displs_out, recv, counts_in, displs_in)
        at = list(displs_in)
        for reader, read in sorted(takes, key=lambda t: t[0]):
            block, at[reader] = self._block(read, recv, at[reader])
            for view, box in self._places(read.name, read.box):
                view[...] = block[relative_slices(box, read.box)]

    def _pack(
        self, sends: list[tuple[int, Read]], displs: list[int], send: np.ndarray, source: ByteSource
    ) -> None:
        at = list(displs)
        done: dict[tuple[str, Box], np.ndarray] = {}
        for taker, read in sends:
            block, at[taker] = self._block(read, send, at[taker])
            key = (read.name, read.box)
            if key in done:
                block[...] = done[key]
            elif self.rank in read.takers:
                for view, box in self._places(read.name, read.box):
                    block[relative_slices(box, read.box)] = view
            else:
                source.read(read.name, read.box, block)
                self._count(read)
            done[key] = block
            self.sent_bytes += block.nbytes

    def _block(self, read: Read, buffer: np.ndarray, at: int) -> tuple[np.ndarray, int]:
        dtype = dtypes.get(self.plan.by_name[read.name].dtype).numpy
        size_bytes = volume(read.box) * dtype.itemsize
        flat = buffer[at : at + size_bytes]
        return np.ndarray(shape_of(read.box), dtype, buffer=flat.data), at + size_bytes

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

    def _count(self, read: Read) -> None:
        self.read_bytes += volume(read.box) * self.plan.by_name[read.name].itemsize_bytes
        if self._progress is not None:
            self._progress(self.read_bytes, self._total_bytes)


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


def _rounds(plan: LoadPlan) -> Iterable[list[Read]]:
    """Group what is read for others so that no rank sends or receives more than a few chunks at a time."""
    waiting: list[Read] = []
    out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
    # One read of each rank in turn, so that all of them have something to do in every round.
    lanes: dict[int, list[Read]] = {}
    for read in plan.reads:
        if any(t != read.reader for t in read.takers):
            lanes.setdefault(read.reader, []).append(read)
    for row in range(max(map(len, lanes.values()), default=0)):
        for lane in lanes.values():
            if row >= len(lane):
                continue
            read = lane[row]
            size_bytes = volume(read.box) * plan.by_name[read.name].itemsize_bytes
            takers = [t for t in read.takers if t != read.reader]
            if waiting and (
                out[read.reader] + size_bytes * len(takers) > CHUNK_BYTES
                or any(into[t] + size_bytes > CHUNK_BYTES for t in takers)
            ):
                yield waiting
                waiting, out, into = [], [0] * plan.num_ranks, [0] * plan.num_ranks
            waiting.append(read)
            out[read.reader] += size_bytes * len(takers)
            for taker in takers:
                into[taker] += size_bytes
    if waiting:
        yield waiting


def _buffer(counts: list[int]) -> tuple[np.ndarray, list[int]]:
    displs, at = [], 0
    for count in counts:
        displs.append(at)
        at += count
    return np.empty(at, np.uint8), displs


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
