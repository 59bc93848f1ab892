"""Every way to fail, at every place: the job ends in time, with the right code, and names the rank that failed.

A default run tries each way and each place once, in pairs that rotate with the seed; a full run tries all.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import mode
from support.fake_hosts import ENVIRONMENT, FakeHost, cut, fake_hosts, options, why_not
from support.launching import ENDS_WITHIN_S, LIMIT_S, Ended, Launcher, wait_until

from lowshard.launch.leftover import stray_files

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(110)]

PROGRAM = str(Path(__file__).resolve().parent / "run_fault.py")
RANKS = 4
AT_A_TIME = 2
BEAT_S = 2.0  # the limit of silence in these tests
SILENT_ENDS_WITHIN_S = BEAT_S + 3.0  # from the moment that a rank falls silent to the end of the others
LAUNCHER_S = 2.0  # from the end of the ranks to that of the launcher
START_S = 60.0  # for a job to come to the fault; then its ranks show their stacks and end
SLOW = 1.5  # all limits are longer by this factor: other work has the cores too

FAULTS = ["raise", "exit", "SIGKILL", "SIGSTOP", "SIGSEGV", "cut off"]
COLLECTIVES = ["all_reduce", "all_to_all_v", "barrier", "split"]
PLACES = [*COLLECTIVES, "idle", "start-up"]
ONLY_FULL = ["all_reduce loop", "before MPI"]
CODES = {"raise": 1, "exit": 3}
CODE_OF_OTHERS = 70
MORE_CELLS = 0

# What the launcher says of the rank that failed, and what the others' error says of it.
TOLD = {
    "raise": r"ValueError: boom",
    "exit": r"sys\.exit\(3\)",
    "SIGKILL": r"killed by signal 9 \(SIGKILL\)",
    "SIGSTOP": r"has been stopped \(SIGSTOP\) for [123]\.\d s",  # as the keeper sees it, which looks now and then
    "SIGSEGV": r"killed by signal 11 \(SIGSEGV\)",
    "cut off": r"host {host} \(ranks {ranks}\) has not been heard of for [23]\.\d s",
}
SAID = {
    "raise": r"failed: ValueError: boom",
    "exit": r"ended its program: sys\.exit\(3\)",
    "SIGKILL": r"died \(its connection closed\)",
    "SIGSTOP": r"has been silent for [23]\.\d s",
    "SIGSEGV": r"died \(its connection closed\)",
    "cut off": r"has been silent for [23]\.\d s",
}


@dataclass(frozen=True)
class Cell:
    """One job.

    Attributes:
        fault: how it fails.
        place: where the victim is not, and the others wait for it.
        victim: the rank that fails; with "cut off", 1 stands for the second host and 0 for the first.
    """

    fault: str
    place: str
    victim: int

    def __str__(self) -> str:
        return f"{self.fault}, {self.place}, {self.victim}"

    @property
    def victims(self) -> list[int]:
        """The ranks that fail: one, or all of a host."""
        if self.fault != "cut off":
            return [self.victim]
        half = RANKS // 2
        return list(range(self.victim * half, (self.victim + 1) * half))

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(RANKS) if rank not in self.victims]

    @property
    def is_silent(self) -> bool:
        """Whether nothing but the silence tells of the failure."""
        return self.fault in ("SIGSTOP", "cut off")


def chosen() -> list[Cell]:
    """Returns the cells of this run."""
    everything = [
        Cell(fault, place, victim) for victim in (1, 0) for fault in FAULTS for place in [*PLACES, *ONLY_FULL]
    ]
    if mode.full():
        return everything
    turned = mode.rng("fault matrix").permutation(PLACES).tolist()
    each_once = [Cell(fault, place, 1) for fault, place in zip(FAULTS, turned, strict=True)]
    others = [
        cell
        for cell in everything
        if cell.victim == 1 and cell.place in PLACES and cell not in each_once and cell.fault != "cut off"
    ]
    return [*each_once, *mode.sample(others, MORE_CELLS, "fault matrix")]


CELLS = chosen()


@dataclass(frozen=True)
class Over:
    """A job that has ended.

    Attributes:
        ended: the launcher's end.
        failed_s: when the fault happened (wall clock).
        survivors_s: when the last of the other ranks was gone.
        said: the error that each rank met in the collective.
        host: name of the host that was cut off, or "".
        launcher: what started it.
    """

    ended: Ended
    failed_s: float
    survivors_s: float
    said: dict[int, str]
    host: str
    launcher: Launcher


def lives(pid: int) -> bool:
    """Says whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(cell: Cell, folder: Path) -> Over:
    """Runs the job of a cell."""
    folder.mkdir()
    notes = folder / "notes"
    notes.mkdir()
    launcher = Launcher(folder, uuid.uuid4().hex, stray_files())
    with ExitStack() as stack:
        hosts = stack.enter_context(fake_hosts(2)) if cell.fault == "cut off" else []
        return run_on(cell, notes, launcher, hosts)


def run_on(cell: Cell, notes: Path, launcher: Launcher, hosts: list[FakeHost]) -> Over:
    """Runs the job of a cell on fake hosts, or on this host where there are none."""
    apart, env = (options(hosts), ENVIRONMENT) if hosts else ([], {})
    started = launcher.start(
        "run",
        *("-n", str(RANKS), *apart, "--timeout", str(START_S), PROGRAM, cell.fault, cell.place),
        *(",".join(map(str, cell.victims)), str(notes)),
        LOWSHARD_HEARTBEAT_S=str(BEAT_S),
        **env,
    )
    failed = [notes / f"failed-{rank}" for rank in cell.victims]
    wait_until(lambda: all(path.exists() for path in failed) or started.poll() is not None, START_S)
    if not all(path.exists() for path in failed):
        ended = launcher.finish(started)
        raise AssertionError(f"{cell}: the job ended before the fault\n{ended.out}\n{ended.err}")
    host, failed_s = "", min(float(path.read_text()) for path in failed)
    if hosts:
        failed_s = time.time()
        cut(hosts[cell.victim])
        host = hosts[cell.victim].name
    pids = [int((notes / f"pid-{rank}").read_text()) for rank in cell.survivors]
    wait_until(lambda: not any(lives(pid) for pid in pids), LIMIT_S)
    survivors_s = time.time()
    ended = launcher.finish(started)
    said = {int(path.name.rpartition("-")[2]): path.read_text() for path in notes.glob("said-*")}
    return Over(ended, failed_s, survivors_s, said, host, launcher)


@pytest.fixture(scope="module")
def over(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future[Over]]]:
    """The jobs of all cells that pytest has selected, running a few at a time."""
    folder = tmp_path_factory.mktemp("cells")
    selected = mode.selected(request, "cell")
    cells = [cell for cell in CELLS if cell in selected and (cell.fault != "cut off" or why_not() is None)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {cell: pool.submit(run, cell, folder / str(number)) for number, cell in enumerate(cells)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_ends_the_job_in_time_and_is_told_of(cell: Cell, over: dict[Cell, Future[Over]]) -> None:
    if cell not in over:
        pytest.skip(str(why_not()))
    job = over[cell].result()
    err = job.ended.err
    assert job.ended.code == CODES.get(cell.fault, CODE_OF_OTHERS), err
    assert "not reached" not in job.ended.out

    told = TOLD[cell.fault].format(host=job.host, ranks=", ".join(map(str, cell.victims)))
    last = err.strip().splitlines()[-1]
    assert re.match(rf"lowshard run: rank {cell.victims[0]} failed first: {told}", last), err

    limit_s = SLOW * (SILENT_ENDS_WITHIN_S if cell.is_silent else ENDS_WITHIN_S)
    assert job.survivors_s - job.failed_s < limit_s, err
    assert job.ended.ended_s - job.failed_s < limit_s + SLOW * LAUNCHER_S, err

    collective = cell.place.removesuffix(" loop")
    if collective in COLLECTIVES:
        assert set(job.said) >= set(cell.survivors), f"only {sorted(job.said)} said why they end\n{err}"
        ranks = "|".join(map(str, cell.victims))
        for rank in cell.survivors:
            pattern = (
                rf"PeerFailed: rank ({ranks}) {SAID[cell.fault]}.*; "
                rf"this rank was in {collective}#\d+.* \(run_fault\.py:\d+\)"
            )
            assert re.fullmatch(pattern, job.said[rank], re.DOTALL), job.said[rank]
    job.launcher.check_nothing_left()
