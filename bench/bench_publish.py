"""`lowshard bench publish`: versions from a publisher to a subscriber over TCP, beside a bare socket."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import HostDevice, require_memory
from lowshard.bench.bench_limits import OF_BARE, OF_WHOLE
from lowshard.bench.bench_report import Beside, Limit, Report, Row, Spread
from lowshard.bench.bench_world import Progress, job_size
from lowshard.bench.machine import facts
from lowshard.bench.turn_timing import Runner, ToldClock, take_turns
from lowshard.errors import LowshardError, VerificationError

DESCRIPTION = """\
Starts a publisher and a subscriber as two processes of this machine, and takes version after version over TCP of the
loopback interface, as another host would: all of it, and what has changed, 1 % of bf16 elements. Each is followed by
a bare socket that moves as many bytes from memory to memory, without a checksum. What has come is compared with what
was published.
"""
EPILOG = """\
Columns: bytes that came; time, median over the rounds; 10^9 bytes a second; time as a multiple of the bare socket's,
with quartiles; its speed; time over that of the whole version. Both processes share this machine's cores.
Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
CHANGED = 0.01
ANSWER_S = 180.0
"""How long a process may take for one answer; what it does has limits of 60 s of its own."""
_WARMING = 2
"""Rounds that do not count: in the first one everything comes whole, in the second the first changes."""
_TIMES_THE_SIZE = 9
"""Memory: of the publisher the arrays and three snapshots, of two subscribers two sets, and of the bare socket two."""


def add_publish_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `publish`."""
    summary = "versions for another job over TCP, beside a bare socket"
    parser = options.add_parser(benches, "publish", run_publish, summary, DESCRIPTION, EPILOG)
    parser.add_argument("--size", type=options.size, default="256M", metavar="SIZE",
                        help="bytes of a version (default 256M)")  # fmt: skip
    parser.add_argument("--rounds", type=options.count, default=15, metavar="N", help="rounds (default 15)")
    options.add_result_arguments(
        parser,
        f"a whole version comes at {OF_BARE:g} of the rate of a bare socket, and one of which 1 %% has changed takes "
        f"{OF_WHOLE:g} of its time at most",
    )


def run_publish(args: argparse.Namespace) -> int:
    """Run `lowshard bench publish` and return the exit code."""
    options.require_results(args)
    if job_size() is not None:
        raise LowshardError(
            "lowshard bench publish starts its own two processes: run it outside of an MPI job"
        )
    require_memory(_TIMES_THE_SIZE * args.size, HostDevice().free_bytes())
    say = Progress("publish")
    say("starting two processes")
    with _Side("giver") as giver, _Side("taker") as taker:
        report = _measure(giver, taker, args.size, args.rounds, say)
    bare = table.fact_column("bare", "bare_gb_per_s", ".2f", "(GB/s)")
    whole = table.fact_column("x whole", "of_whole", ".2f")
    columns = (*table.standard("bare"), bare, whole)
    return options.conclude(report, args, table.report_lines(report, columns))


class _Side:
    """One of the two processes, from here: what it is asked, and what it answers."""

    def __init__(self, kind: str) -> None:
        from lowshard.settings import CROSS_MEMORY, environment

        self._kind = kind
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the block)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lowshard.bench.publish_side", kind],
            env={**environment(), CROSS_MEMORY.name: "off"},  # else the snapshot would be mapped
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0 if exc[0] is None else 0.0)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()

    def say(self, do: str, **more: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` tells why
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[
            0
        ]:  # no more than one answer is under way
            raise LowshardError(
                f"the {self._kind} of lowshard bench publish, process {self._process.pid}, has not answered within "
                f"{ANSWER_S:g} s; pass a smaller --size if this machine is that slow"
            )
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise LowshardError(f"the {self._kind} of lowshard bench publish has ended:\n{self._said.read()}")
        return json.loads(line)

    def ask(self, do: str, **more: Any) -> Any:
        self.say(do, **more)
        return self.hear()


def _measure(
    giver: _Side, taker: _Side, size_bytes: int, rounds: int, say: Callable[[str], object]
) -> Report:
    """Return the report."""
    from lowshard.bench.publish_side import CHANGES, WHOLE

    token = secrets.token_hex(32)
    there = giver.ask("open", size_bytes=size_bytes, token=token)
    taker.ask("open", size_bytes=size_bytes, address=there["address"], token=token, port=there["port"])
    giver.ask("accept")
    total, version, came = int(there["bytes"]), 0, 0
    sizes: list[int] = []

    def bare(size: int) -> float:
        giver.say("send", size_bytes=size)
        seconds = float(taker.ask("receive", size_bytes=size))
        giver.hear()
        return seconds

    def pulled(which: str) -> float:
        got = taker.ask("pull", which=which)
        if got["version"] != version:
            raise VerificationError(f"version {version} is offered, {got['version']} came")
        nonlocal came
        came = max(1, int(got["received_bytes"]))
        return float(got["seconds"])

    def order(turn: int) -> tuple[int, ...]:
        nonlocal version
        version = giver.ask("publish", changed=CHANGED)
        # What comes first after a version was published finds both processes otherwise than what comes next.
        return (1, 0, 2, 3) if turn % 2 else (0, 1, 2, 3)

    works = (
        Runner(lambda: pulled(WHOLE)),
        Runner(lambda: bare(total)),
        Runner(lambda: pulled(CHANGES), after=lambda: sizes.append(came)),
        Runner(lambda: bare(came)),
    )
    whole, whole_bare, few, few_bare = take_turns(
        works, rounds, ToldClock(), warm=_WARMING, order=order, say=say
    )  # fmt: skip
    sums = giver.ask("sums")
    for which in (WHOLE, CHANGES):
        if taker.ask("sums", which=which) != sums:
            raise VerificationError(f"{which}: what came is not what was published")
    for side in (taker, giver):
        side.ask("close")
    changed = int(statistics.median(sizes[_WARMING:]))
    rows = []
    for name, moved, own, other in (
        ("whole version", total, whole, whole_bare),
        (f"{100 * CHANGED:g} % changed", changed, few, few_bare),
    ):
        more = {"bare_gb_per_s": moved / other.median_s / 1e9}
        rows.append(Row(name, moved, own, {"bare": Beside(other)}, facts=more))
    rate = Spread.of([1 / x for x in whole.over(whole_bare)]).median
    of_whole = Spread.of(few.over(whole)).median
    rows[0] = replace(rows[0], limits=(Limit("rate of the bare socket's", rate, OF_BARE, at_least=True),))
    rows[1] = replace(
        rows[1], limits=(Limit("x whole", of_whole, OF_WHOLE),), facts={**rows[1].facts, "of_whole": of_whole}
    )
    return Report("publish", facts(), {"bytes": total, "rounds": rounds}, tuple(rows))
