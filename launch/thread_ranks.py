"""Ranks as threads of one process: `lowshard run --threads` calls the script's `main(comm)` in each.

Needs no MPI, starts at once, and one debugger sees all ranks. The script is loaded once: what it does at its top
level is done once, and its globals are shared by all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from lowshard.argument import truth
from lowshard.comm import run_loopback
from lowshard.comm.abort import FailureRecord, exit_code_of
from lowshard.comm.call import stack_of
from lowshard.errors import CommError, LaunchError, PeerFailed
from lowshard.interrupt import signal_of
from lowshard.launch.exit_code import code_of
from lowshard.launch.job import as_words, checked_size
from lowshard.launch.verdict import JobResult, Leaver, failure_text, judge
from lowshard.settings import TIMEOUT_S

__all__ = ["READER_S", "call_within", "run_threads"]

_GRACE_S = 1.0  # for the other ranks to say that they have noticed
_TICK_S = 0.05
READER_S = 1.0  # for who reads the output to go on, once the job is to end
_OUR_FRAMES = (__file__, "<frozen importlib")


def run_threads(
    target: str,
    args: Sequence[str],
    n: int,
    *,
    module: bool = False,
    timeout_s: float | None = None,
    prefix_output: bool = True,
) -> JobResult:
    """Runs `main(comm)` of a script in n threads of this process; returns when all have ended, or one has failed.

    Threads cannot be ended from outside: after a failure or a time-out some may still run, and the caller should end
    the process.

    Args:
        target: path of a script, or name of a module.
        args: `sys.argv[1:]` of the script.
        n: number of ranks.
        module: whether the target is a module's name.
        timeout_s: gives up after so many seconds, with the stacks of all ranks; None for no limit.
        prefix_output: puts `[rank] ` in front of each line that a rank prints from Python.

    Raises:
        LaunchError: n or timeout_s cannot be, or the target is not there or has no `main`.
    """
    n, timeout_s = checked_size(n, timeout_s)
    (target,) = as_words([target], "target is the path of a script, or the name of a module")
    args = as_words(args, "args is a sequence of texts")
    module = truth(module, "module is True or False", LaunchError)
    prefix_output = truth(prefix_output, "prefix_output is True or False", LaunchError)
    before = sys.argv, sys.path[:], sys.stdout, sys.stderr
    sys.argv = [target, *args]
    try:
        return _run(target, n, module, timeout_s, prefix_output)
    finally:
        sys.argv, sys.path[:], sys.stdout, sys.stderr = before


def _run(target: str, n: int, module: bool, timeout_s: float | None, prefix_output: bool) -> JobResult:
    """Loads the script, runs the ranks, says how they ended."""
    start_s = time.monotonic()
    try:
        main = _load_main(target, module)
    except (LaunchError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the script's own
        return _failed_to_load(target, error, time.monotonic() - start_s)
    ranks = _Ranks(n, main)
    streams: list[_Prefixed] = []
    if prefix_output:
        streams = [_Prefixed(sys.stdout, ranks), _Prefixed(sys.stderr, ranks)]
        sys.stdout, sys.stderr = streams
    ended_by, timed_out = ranks.run(TIMEOUT_S.seconds(), None if timeout_s is None else start_s + timeout_s)
    result = judge(
        ranks.failures(),
        n,
        time.monotonic() - start_s,
        status=0,
        leavers=ranks.leavers(),
        ended_by=ended_by,
        limit_s=timeout_s if timed_out else None,
    )

    def tell() -> None:
        if timed_out:
            ranks.show_stacks(sys.stderr)
        sys.stderr.write(failure_text(result))
        sys.stderr.flush()

    for write in (*(stream.end_lines for stream in streams), tell):
        with contextlib.suppress(ValueError):  # the program has closed the stream
            if timed_out or ended_by is not None:
                call_within(READER_S, write)
            else:
                write()
    return result


def call_within(limit_s: float, write: Callable[[], None]) -> None:
    """Runs what writes output; goes on without it where its reader has not made room within the limit."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lowshard output", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]


class _Ranks:
    """The threads of a job, and what has become of them."""

    def __init__(self, n: int, main: Callable[[Any], object]) -> None:
        self._n = n
        self._main = main
        self._here = threading.local()
        self._threads: dict[int, int] = {}  # rank: thread
        self._ended = 0
        self._failures: list[FailureRecord] = []
        self._leavers: list[Leaver] = []
        self._changed = threading.Condition()

    @property
    def rank(self) -> int | None:
        """The rank of the calling thread; None for a thread that is none."""
        return getattr(self._here, "rank", None)

    def failures(self) -> tuple[FailureRecord, ...]:
        """Returns the records so far, in order of time."""
        with self._changed:
            return tuple(self._failures)

    def leavers(self) -> tuple[Leaver, ...]:
        """Returns the ranks that have ended well so far."""
        with self._changed:
            return tuple(self._leavers)

    def run(self, wait_s: float, until_s: float | None) -> tuple[int | None, bool]:
        """Starts the ranks and waits for them; returns the signal that ended it, and whether the time ran out."""
        threading.Thread(target=self._start, args=(wait_s,), name="lowshard ranks", daemon=True).start()
        failed_s: float | None = None
        try:
            while self._ended < self._n:
                with self._changed:
                    self._changed.wait(_TICK_S)
                now_s = time.monotonic()
                if failed_s is None and self._failures:
                    failed_s = now_s
                if failed_s is not None and now_s > failed_s + _GRACE_S:
                    break
                if failed_s is None and until_s is not None and now_s > until_s:
                    return None, True
        except KeyboardInterrupt as end:
            return signal_of(end), False
        return None, False

    def show_stacks(self, stream: TextIO) -> None:
        """Prints where each rank is."""
        for rank, thread in sorted(self._threads.items()):
            for file, line, name in reversed(stack_of(thread)):
                stream.write(f'[{rank}]   File "{file}", line {line}, in {name}\n')
                stream.write(f"[{rank}]     {linecache.getline(file, line).strip()}\n")

    def _start(self, wait_s: float) -> None:
        """Runs the ranks; what they raise is in their records, and how long they may run is not its business."""
        with contextlib.suppress(BaseException):
            run_loopback(self._n, self._run_rank, timeout_s=wait_s)

    def _run_rank(self, comm: Any) -> None:
        """One rank's thread."""
        self._here.rank = comm.rank
        self._threads[comm.rank] = threading.get_ident()
        record = None
        try:
            self._main(comm)
        except SystemExit as end:
            code = code_of(end)
            if code:
                record = _record_of_exit(comm.rank, end, code)
                raise
        except BaseException as error:
            record = _record_of_error(comm.rank, error)
            raise
        finally:
            with self._changed:
                if record is not None:
                    self._failures.append(record)
                else:
                    self._leavers.append(Leaver(comm.rank, time.time(), in_order=True))
                self._threads.pop(comm.rank, None)
                self._ended += 1
                self._changed.notify_all()


class _Prefixed:
    """A text stream that puts the rank in front of the lines of each rank's thread; whole lines, never mixed."""

    def __init__(self, sink: TextIO, ranks: _Ranks) -> None:
        self._sink = sink
        self._ranks = ranks
        self._partial: dict[int, list[str]] = {}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def write(self, text: str) -> int:
        """Writes the whole lines; keeps the rest until its line ends."""
        rank = self._ranks.rank
        with self._lock:
            if rank is None:
                return self._sink.write(text)
            whole, end, rest = text.rpartition("\n")
            partial = self._partial.setdefault(rank, [])
            if end:
                lines = "".join([*partial, whole]).split("\n")
                partial.clear()
                self._sink.write("".join(f"[{rank}] {line}\n" for line in lines))
            if rest:
                partial.append(rest)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    def end_lines(self) -> None:
        """Writes what no line end has followed."""
        with self._lock:
            for rank, partial in sorted(self._partial.items()):
                if partial:
                    self._sink.write(f"[{rank}] {''.join(partial)}\n")
            self._partial.clear()
            self._sink.flush()


def _load_main(target: str, module: bool) -> Callable[[Any], object]:
    """Loads the script once and returns its main."""
    if module:
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        try:
            found = importlib.util.find_spec(target)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise LaunchError(f"no module named {target!r}; give the name that `python -m` takes")
        loaded = importlib.import_module(target)
    else:
        path = Path(target).absolute()
        if not path.exists():
            raise LaunchError(f"no script {target!r} in {os.getcwd()}")
        if not sys.flags.safe_path:
            sys.path[0] = str(path.parent)
        # Never "__main__": what stands under that test is for a process of its own.
        name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "lowshard_script"
        loader = importlib.machinery.SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        loader.exec_module(loaded)
    main: Callable[[Any], object] | None = getattr(loaded, "main", None)
    if not callable(main):
        raise LaunchError(
            f"--threads runs the function main(comm) of the script in each thread, but {target} defines none; write "
            f"def main(comm): ... (comm is a lowshard communicator), or start processes: leave --threads away"
        )
    return main


def _failed_to_load(target: str, error: BaseException, seconds: float) -> JobResult:
    """Returns the result of a script that failed before there were ranks, and prints it."""
    if isinstance(error, SystemExit):
        code = code_of(error)
        if not code:
            raise LaunchError(
                f"{target} ended with sys.exit while it was loaded, before its main(comm) could be called"
            )
        record = _record_of_exit(0, error, code)
    else:
        record = _record_of_error(0, error)
    result = JobResult(
        record.exit_code, record.kind, None, f"{target} failed while it was loaded: {record.message}", seconds
    )
    sys.stderr.write(record.traceback + failure_text(result))
    sys.stderr.flush()
    return result


def _record_of_exit(rank: int, end: SystemExit, code: int) -> FailureRecord:
    return FailureRecord(rank, time.time(), "exit", code, f"sys.exit({end.code!r})")


def _record_of_error(rank: int, error: BaseException) -> FailureRecord:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
        trace = trace.tb_next  # our own frames say nothing about the program
    lines = traceback.format_exception(type(error), error, trace)
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return FailureRecord(
        rank,
        time.time(),
        "exception",
        exit_code_of(error),
        traceback.format_exception_only(error)[-1].strip(),
        "".join(lines),
        error=name,
        consequence=isinstance(error, PeerFailed),
        about=error.ranks if isinstance(error, CommError) else (),
    )
