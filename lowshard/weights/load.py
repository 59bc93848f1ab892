"""`load`: walks a load plan. Reads go straight into their place; what others need is handed out.

Where the ranks in reach of each other all read for others, and the system lets them, each writes what it reads to its
place in the others' arrays, out of a scratch in its cache; nobody waits for anybody on the way. Elsewhere it goes in
rounds: what a reader reads lies in its half, in reach of its peers; what others need is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words
from lowshard.box import Box, full_box, intersect, relative_slices, single_run, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files, Piece, StoredPart, Tally, chain, sum_of
from lowshard.comm import Communicator, collective_step, share_text
from lowshard.comm.agreement import control_of, share
from lowshard.errors import CheckpointError, PlanError
from lowshard.tiling import Tiling
from lowshard.transfer.mover import RoundMessages, run_rounds
from lowshard.weights.load_plan import LoadPlan, Read
from lowshard.weights.read_scatter import Block, ReadScatter, read_scatter, shared_reads

Progress = Callable[[int, int], None]

_BLOCK_BYTES = 64 << 20
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class LoadReport:
    """What one rank did, to compare with its plan."""

    read_bytes: int
    sent_bytes: int
    verified_bytes: int


def load(
    files: Files | Catalog, plan: LoadPlan, comm: Communicator | None = None, *, verify: bool = True,
    mapped: bool = False, progress: Progress | None = None, reports: list[LoadReport] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return this rank's arrays, by name, read as the plan says.

    Collective: all ranks of the communicator call this. Beside the arrays a rank needs some 20 MB. Checksums that
    the checkpoint has are compared first, each by one rank, so that no damaged byte is handed out.

    Args:
        files: the checkpoint, as for `Catalog.open`; the one the plan was made for.
        plan: from `plan_load`, equal on every rank, as `verify` is (their digest is compared first).
        comm: a communicator of host arrays with the plan's number of ranks; None for a plan of one rank.
        verify: False skips the checksums.
        mapped: True gives arrays that are one run of a file, and that this rank alone reads, as private memory maps: no
            byte of them is copied, their pages are the page cache's until the rank writes to them, and the file must
            not be changed in place while they live. The others are read as ever.
        progress: called on rank 0 with the bytes it has read so far and all it will read.
        reports: if given, what this rank read and sent is appended.

    Returns:
        Arrays of `tiling.local_shape(rank)`; a rank that takes no part in a tiling has no array of that name.

    Every rank raises the same error.

    Raises:
        CheckpointError: a file is missing, damaged, or other than when the plan was made; the text names file and
            tensor.
        PlanError: another number of ranks.
        MismatchError: ranks hold different plans, or `verify` differs.
    """
    rank, size = (0, 1) if comm is None else (control_of(comm).rank, comm.size)
    source: ByteSource | None = None
    try:
        with collective_step(comm, "load", path=files) as step:
            _check_arguments(plan, size, verify, mapped, progress, reports)
            # Checksums are compared between ranks, so all do it or none.
            step.digest, step.said = (
                plan.digest_bytes[:: 1 if verify else -1],
                partial(_in_words, plan, verify),
            )
            rank_plan = RankPlan.of(plan, _same_catalog(files, plan), rank)
            source = ByteSource(rank_plan.catalog)
            check = Verification(rank_plan.checked if verify else (), source, rank, size)
            tally = check.tally if rank_plan.checked and verify else None
            job = _Load(plan, rank, rank_plan, source, tally, progress, mapped=mapped)
        # All ranks have read the headers by now, and open the files for data only from here on. Each compares a file
        # with the one whose header it read (`ByteSource`), so no two ranks read two versions of it. Nothing of a file
        # is compared between ranks: those of other hosts may read copies.
        with collective_step(comm, "load", path=files, meets=True) as step:
            job.run(comm, step)
            step.attempt(check.compare_own)
        if not check.share(comm):
            with collective_step(comm, "load", path=files):
                check.compare_rest()
        if reports is not None:
            reports.append(LoadReport(job.read_bytes, job.sent_bytes, check.verified_bytes))
        return job.arrays
    finally:
        if source is not None:
            source.close()


def nodes_of(comm: Communicator) -> list[int]:
    """Return the node of each rank, numbered in the order of their lowest ranks.

    Ranks are on one node if they reach each other's memory; where no two do, if their machine is the same.

    Collective: all ranks of the communicator call this.
    """
    control = control_of(comm)
    homes = control.reach.homes
    names: Sequence[object] = homes
    if len(set(homes)) == len(homes):
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            boot = ""
        names = share_text(control, f"{socket.gethostname()} {boot}")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


class _Load:
    """One rank's walk through a plan. What goes wrong on the way is kept: the others wait for this rank."""

    def __init__(
        self, plan: LoadPlan, rank: int, rank_plan: RankPlan, source: ByteSource, tally: Tally | None,
        progress: Progress | None, *, mapped: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.rank = plan, rank
        self.arrays: dict[str, np.ndarray] = {}
        self.read_bytes = self.sent_bytes = 0
        self._rank_plan, self._source, self._tally, self._mapped = rank_plan, source, tally, mapped
        self._blocks: list[np.ndarray] = []
        self._progress = progress if rank == 0 else None
        self._own_at = self._own_done = 0

    def run(self, comm: Communicator | None, step: collective_step) -> None:
        """Make and fill this rank's arrays; what fails is kept by the step, since others wait for this rank."""
        step.attempt(self.allocate)
        if comm is not None:
            self._scatter(comm, step)
        step.attempt(self._read_own, 1.0)

    def _scatter(self, comm: Communicator, step: collective_step) -> None:
        """Read, and hand out what this rank reads for others: within reach by memory, to others by messages."""
        reach, reads = comm.reach, self._rank_plan.shared
        homes = reach.homes
        if all(homes[t] == homes[r.reader] for r in reads for t in r.takers):  # the same on all ranks
            reads = tuple(r for r in reads if r.reader in reach.peers)
        if reads:
            scatter = self._rank_plan.scatter(reads, homes)
            comm.step(  # which counts it, and names it where a rank fails
                "load", f"load: {len(self._rank_plan.shared)} reads handed out",
                self._go_in_rounds, comm, scatter, step,
                sent_bytes=scatter.near_sent_bytes, received_bytes=scatter.near_received_bytes,
                reached_bytes=scatter.near_received_bytes,
            )  # fmt: skip

    def allocate(self) -> None:
        """Make this rank's arrays, empty."""
        self._blocks = [np.empty(size_bytes, np.uint8) for size_bytes in self._rank_plan.blocks]
        for name, block, at, shape, dtype in self._rank_plan.places:
            self.arrays[name] = np.ndarray(shape, dtype, self._blocks[block].data, at)

    def _go_in_rounds(self, comm: Communicator, scatter: ReadScatter, step: collective_step) -> None:
        """Hand out what this rank reads for others, and take what they read for it; see `run_rounds`."""
        reach, rounds = comm.reach, scatter.rounds
        out = [comm.empty(scatter.half_bytes, "uint8") for _ in range(2)]
        into = [np.empty(scatter.into_bytes, np.uint8) for _ in range(2)]
        messages = RoundMessages(comm, out, into, [r.sends for r in rounds], [r.receives for r in rounds])
        theirs = reach.publish(out)

        def fill(number: int) -> None:
            messages.make_room(number)
            for block in rounds[number].reads:
                step.attempt(self._fetch, block, _in(block, out[number & 1]))
            for pack in rounds[number].packs:
                _in(pack.target, out[number & 1])[...] = _in(pack.block, out[number & 1])[pack.inner]
            messages.send(number)

        def take(number: int) -> None:
            came = messages.take(number)
            for reader, block, inner, where in rounds[number].unpacks:
                step.attempt(self._place, block, _in(block, came[reader])[inner], where)
            for reader, block, inner, where in rounds[number].takes:
                half = out[number & 1] if reader == self.rank else theirs.view(reader, number & 1)
                assert half is not None
                step.attempt(self._place, block, _in(block, half)[inner], where)

        run_rounds(
            range(len(rounds)), fill, lambda number: reach.barrier(), take,
            lambda number: step.attempt(self._read_own, (number + 1) / len(rounds)),
        )  # fmt: skip
        messages.finish()
        reach.barrier()  # the halves are given back when all have taken
        self.sent_bytes += scatter.sent_bytes

    def _fetch(self, block: Block, into: np.ndarray) -> None:
        self._source.read(block.read.name, block.read.box, into, self._tally)
        self._count(into.nbytes)

    def _place(self, block: Block, values: np.ndarray, where: Any) -> None:
        self.arrays[block.read.name][where] = values

    def _read_own(self, share: float) -> None:
        """Read what this rank alone takes into its place, until that share of it is done."""
        own, until = self._rank_plan.own, share * self._rank_plan.own_bytes
        source, tally = self._source, self._tally
        raw = [block.data for block in self._blocks]
        while self._own_at < len(own) and self._own_done <= until:
            name, part, box, run, where, size_bytes = own[self._own_at]
            array = self.arrays[name]
            if (
                self._mapped
                and run is not None
                and size_bytes == array.nbytes
                and run[0] % array.itemsize == 0
            ):
                self.arrays[name] = source.mapped(name, part, run[0], array.shape, array.dtype)
            elif run is not None:
                offset, block, at = run
                source.read_run(name, part, offset, raw[block][at : at + size_bytes], tally)
            else:
                source.read_part(name, part, box, array[where], tally)
            self._own_done += size_bytes
            self._own_at += 1
            self._count(size_bytes)

    def _count(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes
        if self._progress is not None:
            self._progress(self.read_bytes, self._rank_plan.read_bytes)


def _check_arguments(
    plan: object, size: int, verify: object, mapped: object, progress: object, reports: object
) -> None:
    """Raise what is wrong with this rank's arguments."""
    if not isinstance(plan, LoadPlan):
        raise PlanError(f"plan is a LoadPlan, from plan_load, got {brief(plan)}")
    for what, flag in (("verify", verify), ("mapped", mapped)):
        if not isinstance(flag, bool):
            raise PlanError(f"{what} is True or False, got {brief(flag)}")
    if progress is not None and not callable(progress):
        raise PlanError(f"progress is a function of two numbers of bytes, or None, got {brief(progress)}")
    if reports is not None and not isinstance(reports, list):
        raise PlanError(f"reports is a list to append to, or None, got {brief(reports)}")
    if plan.num_ranks != size:
        raise PlanError(f"the plan is for {plan.num_ranks} ranks, the communicator has {size}")


def _in_words(plan: LoadPlan, verify: bool) -> str:
    return (
        f"verify {verify}, {plan.strategy} over nodes {brief(plan.nodes)} of a checkpoint {plan.source[:8]}, "
        f"{in_words(plan.by_name)}"
    )


def _same_catalog(files: Files | Catalog, plan: LoadPlan) -> Catalog:
    catalog = files if isinstance(files, Catalog) else Catalog.open(files)
    held = ((catalog.tensor(name), tiling) for name, tiling in plan.tilings)
    is_other = any((stored.dtype, stored.shape) != (t.dtype, t.shape) for stored, t in held)
    if is_other or catalog.digest != plan.source:
        raise CheckpointError(
            f"{catalog.where}: its tensors lie otherwise than when the plan was made: make it anew with plan_load"
        )
    return catalog


def _in(block: Block, half: np.ndarray) -> np.ndarray:
    return np.ndarray(block.shape, block.dtype, half.data, block.at)


# ---- the plan as one rank walks it


class ArrayPlace(NamedTuple):
    """Where an array lies: in which of its rank's blocks of memory, and from which byte on."""

    name: str
    block: int
    at: int
    shape: tuple[int, ...]
    dtype: Any


class ReadRequest(NamedTuple):
    """A box of a stored array that a rank reads into its own array."""

    name: str
    part: StoredPart
    box: Box
    """In the stored array's coordinates."""
    run: tuple[int, int, int] | None
    """File offset, block and first byte in it, where the box is one run both in the file and in memory."""
    where: Any
    """Index of the local array."""
    size_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan, worked out as it is asked for. It holds no buffer and no open file."""

    plan: LoadPlan
    catalog: Catalog
    rank: int
    _scatters: dict[Any, ReadScatter] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, plan: LoadPlan, catalog: Catalog, rank: int) -> RankPlan:
        """Return a rank's part of a plan for a catalog, kept with the plan for the next time."""
        kept = plan._rank_plans.get(rank)
        if not isinstance(kept, RankPlan) or kept.catalog is not catalog:
            kept = plan._rank_plans[rank] = cls(plan, catalog, rank)
        return kept

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Bytes of the few large blocks that the arrays lie in: huge pages take a tenth of the faults."""
        return self._placed[0]

    @property
    def places(self) -> Iterable[ArrayPlace]:
        """Where each array of this rank lies."""
        return self._placed[1].values()

    @cached_property
    def own(self) -> tuple[ReadRequest, ...]:
        """What this rank reads for itself alone."""
        rank, places, tilings = self.rank, self._placed[1], self.plan.by_name
        return tuple(
            request
            for read in self.plan.reads
            if read.reader == rank and read.takers == (rank,)
            for request in _requests(read, tilings[read.name], self.catalog, rank, places[read.name])
        )

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of `own`."""
        return sum(request.size_bytes for request in self.own)

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that this rank reads, for itself and for others."""
        return self.plan.read_bytes(self.rank)

    @cached_property
    def shared(self) -> tuple[Read, ...]:
        """What ranks hand out among themselves; equal on all ranks."""
        return shared_reads(self.plan.reads)

    def scatter(self, reads: Sequence[Read], homes: tuple[int, ...]) -> ReadScatter:
        """Return this rank's part of handing out reads, kept for the next time; see `read_scatter`."""
        key = (len(reads), homes)  # all that are shared, or those of this rank's home
        found = self._scatters.get(key)
        if found is None:
            found = self._scatters[key] = read_scatter(reads, self.plan.by_name, self.rank, homes)
        return found

    @cached_property
    def checked(self) -> tuple[tuple[str, StoredPart], ...]:
        """Each stored array that has a checksum, and a tensor it belongs to; equal on all ranks."""
        parts = ((name, part) for name, _ in self.plan.tilings for part in self.catalog.tensor(name).parts)
        return tuple({part.key: (name, part) for name, part in parts if part.crc32 is not None}.values())

    @cached_property
    def _placed(self) -> tuple[tuple[int, ...], dict[str, ArrayPlace]]:
        return _array_places(self.plan, self.rank)


def _array_places(plan: LoadPlan, rank: int) -> tuple[tuple[int, ...], dict[str, ArrayPlace]]:
    needs = [-(-t.local_bytes(rank) // _ALIGN_BYTES) * _ALIGN_BYTES for _, t in plan.tilings]
    blocks, places, at, left = [0], {}, 0, sum(needs)
    for (name, tiling), need in zip(plan.tilings, needs, strict=True):
        if rank not in tiling:
            continue
        if at + need > blocks[-1]:
            blocks.append(max(need, min(left, _BLOCK_BYTES)))
            at = 0
        dtype = dtypes.get(tiling.dtype).numpy
        places[name] = ArrayPlace(name, len(blocks) - 1, at, tiling.local_shape(rank), dtype)
        at, left = at + need, left - need
    return tuple(blocks), places


def _requests(
    read: Read, tiling: Tiling, catalog: Catalog, rank: int, place: ArrayPlace
) -> Iterator[ReadRequest]:
    itemsize = place.dtype.itemsize
    for part in catalog.tensor(read.name).parts:
        wanted = intersect(part.box, read.box)
        if wanted is None:
            continue
        for box, local in tiling.places(rank, wanted):
            stored, size_bytes = part.local(box), volume(box) * itemsize
            first, target = single_run(stored, part.entry.shape), single_run(local, place.shape)
            run = None
            if first is not None and target is not None:
                run = part.entry.start + first * itemsize, place.block, place.at + target * itemsize
            where = (..., *relative_slices(local, full_box(place.shape)))
            yield ReadRequest(read.name, part, stored, run, where, size_bytes)


# ---- checksums, compared while it is loaded: from what was read anyway, and once more only for the rest


class Verification:
    """One rank's part in comparing the checksums of all stored arrays that a plan touches."""

    def __init__(
        self, arrays: Sequence[tuple[str, StoredPart]], source: ByteSource, rank: int, size: int
    ) -> None:
        self._arrays, self._source, self._rank, self._size = arrays, source, rank, size
        self.verified_bytes = 0
        self.tally = Tally()
        self._seen = np.zeros(len(arrays), np.int64)
        self._pieces: dict[int, list[Piece]] = {}

    def compare_own(self) -> None:
        """Compare the arrays that this rank has read whole."""
        for number, (name, part) in enumerate(self._arrays):
            pieces = self.tally.pieces(part.key)
            found = chain(part.entry.start, part.entry.stop, pieces)
            if found is None:
                self._pieces[number] = pieces
            else:
                part.check(name, sum_of(found))
                self._seen[number] = 1
                self.verified_bytes += part.entry.size_bytes

    def share(self, comm: Communicator | None) -> bool:
        """Tell all ranks what was compared, and the sums of parts; return whether nothing is left to do."""
        if comm is not None and self._arrays:
            mine = [(n, *p) for n, pieces in self._pieces.items() for p in pieces]
            told = share(comm.control, np.array([len(mine), *self._seen], np.int64))
            self._seen = np.bitwise_or.reduce([t[1:] for t in told])
            self._pieces, most = {}, max(int(t[0]) for t in told)
            table = np.zeros((most, 4), np.int64)
            table[: len(mine)] = np.array(mine, np.int64).reshape(-1, 4)
            tables = share(comm.control, table.reshape(-1)) if most else []
            for theirs, (count, *_) in zip(tables, told, strict=False):
                for number, *piece in theirs.reshape(-1, 4)[: int(count)].tolist():
                    self._pieces.setdefault(number, []).append(tuple(piece))
        return bool(self._seen.all())

    def compare_rest(self) -> None:
        """Compare this rank's part of what is left."""
        load_bytes = [0] * self._size
        for number, (name, part) in enumerate(self._arrays):
            if self._seen[number]:
                continue
            found = chain(part.entry.start, part.entry.stop, self._pieces.get(number, []))
            if found is not None:
                if number % self._size == self._rank:
                    part.check(name, sum_of(found))
                    self.verified_bytes += part.entry.size_bytes
                continue
            turn = load_bytes.index(min(load_bytes))
            load_bytes[turn] += part.entry.size_bytes
            if turn == self._rank:
                self.verified_bytes += self._source.verify(name, part)
