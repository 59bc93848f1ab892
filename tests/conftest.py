"""Settings of every test: --full, the seed, hypothesis profiles, time limits.

Modules that tests share lie in tests/support and are imported as `support.NAME`.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import FrameType

# Before NumPy is loaded, here and in each process that a test starts: threads that OpenBLAS starts with it spin for a
# while, which is a third of what `import lowshard` takes, and other processes have the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import mode, skips

TIME_LIMIT_S = 120.0
PROCESSES = 3  # on two cores: one of them mostly waits, for ranks or for time to pass
FEW_CASES = 3  # of a matrix in a default run; more where a parameter has more values
DEFAULT_SEED = 1  # a default run makes the same choices everywhere; --full makes new ones each time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every case of the big matrices, many more examples")
    parser.addoption("--seed", type=int, default=None, help="random choices other than the usual ones")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let some processes share the files of a run over everything, where pytest-xdist is installed."""
    option = config.option
    is_everything = config.args_source is not pytest.Config.ArgsSource.ARGS
    other = (option.markexpr, option.keyword, option.usepdb, getattr(option, "lf", False))
    is_plain = (
        is_everything and not any(other) and option.capture != "no" and not hasattr(config, "workerinput")
    )
    if is_plain and getattr(option, "numprocesses", 0) is None and option.dist == "no":
        option.numprocesses, option.dist = PROCESSES, "loadfile"
        option.loadscopereorder = False  # files are ordered here


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its own seed option
def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--seed")
    if given is None and hasattr(config, "workerinput"):
        given = mode.seed()  # of the process that started this one
    # A shell that starts us in the background has SIGINT ignored, nohup has SIGHUP, in all that we start too: tests of
    # Ctrl-C, and of processes whose terminal or parent has gone, need them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _keep_bytecode(config.rootpath / ".pytest_cache" / "bytecode")
    full = bool(config.getoption("--full"))
    seed = given if given is not None else secrets.randbits(32) if full else DEFAULT_SEED
    mode.set_mode(full, seed)
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed)
    hypothesis.settings.register_profile("default", max_examples=3, deadline=None, print_blob=True)
    hypothesis.settings.register_profile("full", max_examples=500, deadline=None, print_blob=True)
    if config.getoption("hypothesis_profile", None) is None:
        hypothesis.settings.load_profile("full" if full else "default")
    config.addinivalue_line("markers", f"time_limit(seconds): another limit than {TIME_LIMIT_S:g} s")
    config.addinivalue_line("markers", "full_only: takes long, finds the unusual: `pytest --full` has it")
    config.addinivalue_line("markers", "whole: none of its cases is left out of the default tier")
    config.addinivalue_line("markers", "quiet: measures times; the other processes of a run wait meanwhile")
    if full and hasattr(config, "workerinput"):
        config.pluginmanager.register(_Turns(config.workerinput["testrunuid"]), "lowshard turns")


def pytest_unconfigure() -> None:
    """Remove what Open MPI leaves, at any end of a process without a launcher, as this one is: 16 MiB in /dev/shm."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == Path("/dev/shm") and path.name.startswith("sm_segment."):
            path.unlink(missing_ok=True)


def _keep_bytecode(folder: Path) -> None:
    """Where Python is told to write no bytecode, keep it in a folder of the tests' own instead.

    Otherwise each rank and each command that a test starts compiles every module of lowshard anew: half of their time.
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test whose name is another one in each of the processes that share a run."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"a test's name holds no address, got {item.nodeid}; give ids, such as names")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to the other tier."""
    kept, left = [], []
    dropped = _dropped(items)
    for item in items:
        is_left = item in dropped or (not mode.full() and item.get_closest_marker("full_only"))
        (left if is_left else kept).append(item)
    place = _in_turns([item.path for item in kept])
    # Measures last, when the other processes of a run have ended or soon will.
    quiet = {item.path for item in kept if mode.full() and item.get_closest_marker("quiet")}
    kept.sort(key=lambda item: (item.path in quiet, place[item.path]))
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = kept


def _dropped(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of large matrices that a default run does without.

    Cases of tests that start ranks are drawn where the jobs are put together.
    """
    matrices: dict[str, dict[pytest.Item, dict[str, int]]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and not item.get_closest_marker("mpi") and not item.get_closest_marker("whole"):
            values = {name: id(value) for name, value in call.params.items()}
            matrices.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    return {
        item
        for name, cases in matrices.items()
        for item in cases.keys() - mode.thinned(cases, FEW_CASES, name)
    }


def _in_turns(paths: list[Path]) -> dict[Path, float]:
    """Return where in a run each file stands: files that start ranks, which mostly wait, lie between the others.

    The former are all begun when four fifths of the others are done, the largest first, so that none ends alone.
    """
    place: dict[Path, float] = {}
    for starts_ranks, last in ((True, 0.8), (False, 1.0)):
        sizes = Counter(
            path for path in paths if (path.parent.name in ("mpi", "comm", "launch")) == starts_ranks
        )
        total, so_far = sum(sizes.values()), 0
        for path, size in sizes.most_common():
            place[path] = last * so_far / total
            so_far += size
    return place


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the collections of garbage to come what stays to the end: the tests, and what they have imported."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Not in the header, which `pytest -q` leaves out.
    name = "full" if mode.full() else "default"
    terminalreporter.write_line(f"{name} mode; repeat its random choices with --seed {mode.seed()}")
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    for line in skips.summary(reasons):
        terminalreporter.write_line(line)


class _Turns:
    """Lets tests that measure times run with no other test beside them, in a run that several processes share."""

    def __init__(self, run: str) -> None:
        self._lock = (Path(tempfile.gettempdir()) / f"lowshard-tests-{run}").open("w")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        fcntl.flock(self._lock, fcntl.LOCK_EX if item.get_closest_marker("quiet") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()


@pytest.fixture
def full() -> bool:
    """Whether everything is to be tested."""
    return mode.full()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of the test's own, from the run's seed."""
    return mode.rng(request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with _Limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _Limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with _Limit(item):
        return (yield)


class _Limit:
    """Raises in the main thread, with the stacks of all threads, once a phase of a test took too long."""

    def __init__(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("time_limit")
        self._limit_s = float(mark.args[0]) if mark else TIME_LIMIT_S
        if mode.full():
            self._limit_s *= 10
        self._armed = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._armed:
            self._before = signal.signal(signal.SIGALRM, self._expire)
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __exit__(self, *exc: object) -> None:
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def _expire(self, signum: int, frame: FrameType | None) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        raise TimeoutError(f"the test was not over after {self._limit_s:g} s; all threads:\n{stacks}")
