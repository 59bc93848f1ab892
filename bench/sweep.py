"""Sweeps a collective over types, reductions and sizes: checks every result, times what is right, beside its rivals."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowshard.bench.batch import Runner, Timing, measure
from lowshard.bench.bench_device import HostDevice
from lowshard.bench.bench_meeting import Meeting
from lowshard.bench.case import Case, Request
from lowshard.bench.figure import CollectiveReport, Figure, Row
from lowshard.bench.operation import OPERATIONS
from lowshard.bench.rival import SMALL_BYTES, is_apart, plain_all_reduce, rival
from lowshard.bench.sweep_setting import Placement, Settings
from lowshard.bench.value_pattern import Pattern, is_float
from lowshard.errors import BufferMismatchError, CommError, LowshardError

_FIRST_SEED = 1


def _silent(what: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Place:
    """Where a sweep runs, as one rank sees it."""

    comm: Any
    meeting: Meeting
    cores: int | None = None
    mpi_comm: Any = None
    cpu_s: Callable[[], float] = time.process_time
    say: Callable[[str], object] = _silent

    def measure(
        self, runners: list[Runner], rounds: int, what: str, average: int = 3, calls: int = 0
    ) -> list[Timing]:
        """Time runners in turn on all ranks. Collective: all ranks of the place call this."""
        return measure(
            self.meeting,
            runners,
            rounds,
            average=average,
            calls=calls,
            cores=self.cores,
            cpu_s=self.cpu_s,
            say=lambda turn: self.say(f"{what}, {turn}"),
        )


class Copies:
    """The yardstick: all ranks at once copy as many bytes as the larger buffer has."""

    def __init__(self, most_bytes: int) -> None:
        device, kind = HostDevice(), np.dtype(np.uint8)
        self._source, self._target = device.empty((most_bytes,), kind), device.empty((most_bytes,), kind)
        self._source.fill(1)  # pages that were never written would all be read from one page of zeros
        self._target.fill(2)

    def run(self, size_bytes: int) -> Callable[[], object]:
        """Return the copy of so many bytes."""
        return partial(np.copyto, self._target[:size_bytes], self._source[:size_bytes])


def sweep(
    place: Place,
    settings: Settings,
    facts: tuple[tuple[str, str], ...] = (),
    show: Callable[[Row], object] = lambda row: None,
) -> CollectiveReport:
    """Run a sweep and return what it found, the same on every rank. Collective."""
    _require(place, settings)
    most = max(_request(settings, size, dtype).sizes(place.comm.size).size_bytes
               for size in settings.sizes for dtype in settings.dtypes)  # fmt: skip
    on_host = place.comm.xp is np
    copies = Copies(most) if on_host and most else None
    small_s = None
    if settings.compare_mpi:
        small = Runner(plain_all_reduce(place.mpi_comm, SMALL_BYTES))
        small_s = place.measure([small], settings.rounds, "MPI's small all-reduce")[0].median_s
    rows: list[Row] = []
    for cycle in range(settings.cycles):
        for dtype in settings.dtypes:
            for redop in settings.redops or (None,):
                for size in settings.sizes:
                    request = Request.of(settings, size, dtype, redop)
                    place.say(f"{size:,} bytes of {dtype}, checking")
                    rows.append(_row(place, settings, request, copies, cycle))
                    show(rows[-1])
    return CollectiveReport(facts, settings, place.comm.size, place.comm.transport, tuple(rows), small_s)


def check_all(place: Place, settings: Settings, request: Request, cases: list[Case]) -> list[int]:
    """Return how many elements each case gets wrong over all ranks: exact data, then random, other values each time."""
    wrong = [0] * len(cases)
    for turn in range(settings.checks):
        kinds = (True, False) if is_float(request.dtype) else (True,)
        for exact in kinds:
            seed = _FIRST_SEED + turn
            pattern = Pattern(request.dtype, place.comm.size, request.redop, seed, exact)
            for index, case in enumerate(cases):
                wrong[index] += case.check(pattern)
    return wrong


def _row(place: Place, settings: Settings, request: Request, copies: Copies | None, cycle: int) -> Row:
    """Check and time one size."""
    comm, sizes = place.comm, request.sizes(place.comm.size)
    cases = [Case(comm, request, placement) for placement in request.placements()]
    wrong = check_all(place, settings, request, cases)
    last = Pattern(request.dtype, comm.size, request.redop)
    for case in cases:
        case.load(last)
        case.calm()
        for _ in range(settings.warmups):
            case.run()
        case.finish()
    runners = [Runner(case.run, case.finish) for case in cases]
    if copies is not None:
        runners.append(Runner(copies.run(sizes.size_bytes)))
    rivals: dict[Placement, int] = {}
    if settings.compare_mpi:
        for case in cases:
            call = rival(place.mpi_comm, request, case.placement, case)
            if call is not None:
                rivals[case.placement] = len(runners)
                runners.append(Runner(call))
    what = f"{sizes.size_bytes:,} bytes of {request.dtype}"
    place.say(f"{what}, timing")
    calls = 1 if settings.each else settings.calls
    probe = [Runner(plain_all_reduce(place.mpi_comm))] if rivals and comm.size == 2 else []
    before = place.measure(probe, 3, what) if probe else []
    timings = place.measure(runners, settings.rounds, what, settings.average, calls)
    after = place.measure(probe, 3, what) if probe else []
    apart = is_apart([timing.median_s for timing in before + after]) if probe else None
    for index, case in enumerate(cases):
        if case.placement == "out":  # what a run of calls without a pause has left must be right too
            if rivals:  # and theirs came last
                case.load(last)
                for _ in range(max(1, settings.warmups)):
                    case.run()
                case.finish()
            wrong[index] += case.wrong(last)
    totals = np.sum(place.meeting.exchange(wrong), axis=0).tolist()
    memcpy = None if copies is None else timings[len(cases)]
    figures: dict[Placement, Figure] = {}
    for index, case in enumerate(cases):
        mpi = timings[rivals[case.placement]] if case.placement in rivals else None
        own = timings[index]
        figures[case.placement] = Figure(
            own,
            None if request.op == "barrier" else int(totals[index]),
            None if memcpy is None else own.over(memcpy),
            None if mpi is None else own.over(mpi),
            mpi,
        )
    root = request.root if request.operation.rooted else None
    return Row(
        request.op, comm.size, sizes.size_bytes, sizes.count, request.dtype, request.redop, root,
        figures.get("out"), figures.get("in"), cycle, apart,
    )  # fmt: skip


def _request(settings: Settings, size: int, dtype: str) -> Request:
    return Request.of(settings, size, dtype, None)


def _require(place: Place, settings: Settings) -> None:
    """Raise, on every rank, what keeps the sweep from running here."""
    comm = place.comm
    if not 0 <= settings.root < comm.size:
        raise CommError(f"-r is a rank, 0 to {comm.size - 1}, got {settings.root}")
    if settings.compare_mpi and (place.mpi_comm is None or comm.xp is not np):
        raise LowshardError("--compare-mpi needs MPI ranks and host memory: pass --transport mpi")
    if comm.xp is not np:
        return
    need = need_bytes(settings, comm.size)
    free = HostDevice().free_bytes()
    least = min(place.meeting.exchange(free or (1 << 62)))
    local = place.meeting.exchange(socket.gethostname()).count(socket.gethostname())
    require_fits(need * max(place.meeting.exchange(local)), least)


def need_bytes(settings: Settings, ranks: int) -> int:
    """Return the host memory that the buffers of each rank take at most."""
    pairs = 2 + OPERATIONS[settings.op].in_place + 2 * settings.compare_mpi
    sizes = (
        _request(settings, s, d).sizes(ranks).size_bytes for s in settings.sizes for d in settings.dtypes
    )
    return 2 * pairs * max(sizes)


def require_fits(need: int, free: int | None) -> None:
    """Raise BufferMismatchError when the buffers of a host's ranks do not fit in its free memory."""
    if free is not None and need > free:
        raise BufferMismatchError(
            f"the buffers of this sweep take {need / 1e9:.1f} GB on a host, and {free / 1e9:.1f} GB are free there; "
            "pass a smaller -e"
        )
