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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowshard.bench.json_argument import add_json_argument, size_of, write_result
from lowshard.command_line import count_of
from lowshard.errors import BufferMismatchError, LowshardError, VerificationError

DESCRIPTION = """\
Starts a publisher and a subscriber as two processes of this machine, and takes version after version over TCP of the
loopback interface, as another host would: all of it, and what has changed, 1 % of bf16 elements. Each is followed by
a bare socket that moves as many bytes from memory to memory, without a checksum. What has come is compared with what
was published.
"""
EPILOG = """\
Columns: bytes that came; time, median over the rounds; 10^9 bytes a second; the same of the bare socket, and the
rate over its, the median of the rounds' ratios; time over that of the whole version. Both processes share this
machine's cores. Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
LEAST_OF_RAW = 0.9
"""Rate of a whole version as a share of that of a bare socket: the goal."""
MOST_OF_WHOLE = 0.5
"""Time of a version of which 1 % has changed, as a share of that of a whole one: the goal."""
CHANGED = 0.01
ANSWER_S = 180.0
"""How long a process may take for one answer; what it does has limits of 60 s of its own."""
_WARMING = 2
"""Rounds that do not count: in the first one everything comes whole, in the second the first changes."""
_TIMES_THE_SIZE = 9
"""Memory: of the publisher the arrays and three snapshots, of two subscribers two sets, and of the bare socket two."""


@dataclass(frozen=True)
class Row:
    """One way to bring a version, measured."""

    name: str
    bytes: int
    seconds: tuple[float, ...]
    raw_s: tuple[float, ...]
    of_whole: float | None = None

    @property
    def median_s(self) -> float:
        """Median time of a round."""
        return statistics.median(self.seconds)

    @property
    def of_raw(self) -> float:
        """The rate over that of the bare socket: the median over rounds."""
        return statistics.median([raw / own for raw, own in zip(self.raw_s, self.seconds, strict=True)])


def add_publish_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `publish`."""
    parser = benches.add_parser(
        "publish", help="versions for another job over TCP, beside a bare socket", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--size", type=size_of, default="256M", metavar="SIZE",
                        help="bytes of a version (default 256M)")  # fmt: skip
    parser.add_argument("--rounds", type=count_of, default=15, metavar="N", help="rounds (default 15)")
    add_json_argument(parser)
    parser.add_argument(
        "--check", action="store_true",
        help=f"exit code 1 where a whole version is below {LEAST_OF_RAW:g} of the rate of a bare socket, or one of "
        f"which 1 %% has changed takes more than {MOST_OF_WHOLE:g} of its time",
    )  # fmt: skip
    parser.set_defaults(func=run_publish)


def run_publish(args: argparse.Namespace) -> int:
    """Run `lowshard bench publish` and return the exit code."""
    from lowshard.bench.bench_device import HostDevice
    from lowshard.bench.bench_progress import Progress
    from lowshard.bench.bench_world import job_size

    if job_size() is not None:
        raise LowshardError(
            "lowshard bench publish starts its own two processes: run it outside of an MPI job"
        )
    need, free = _TIMES_THE_SIZE * args.size, HostDevice().free_bytes()
    if free is not None and need > free:
        raise BufferMismatchError(
            f"the versions and their copies take {need:,} bytes, {free:,} are free; pass a smaller --size"
        )
    with Progress("publish") as progress:
        progress.expect(1 + _WARMING + args.rounds)
        progress.step("starting two processes")
        with _Side("giver") as giver, _Side("taker") as taker:
            report = _measure(giver, taker, args.size, args.rounds, progress.step)
    return _conclude(report, args)


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
        """Ask for something, and go on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` tells why
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()

    def hear(self) -> Any:
        """Return the answer."""
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
        """Ask for something, and return the answer."""
        self.say(do, **more)
        return self.hear()


def _measure(
    giver: _Side, taker: _Side, size_bytes: int, rounds: int, step: Callable[[str], object]
) -> dict[str, Any]:
    """Return the report."""
    from lowshard.bench.bench_device import HostDevice
    from lowshard.bench.machine import facts
    from lowshard.bench.publish_side import CHANGES, WHOLE

    token = secrets.token_hex(32)
    there = giver.ask("open", size_bytes=size_bytes, token=token)
    taker.ask("open", size_bytes=size_bytes, address=there["address"], token=token, port=there["port"])
    giver.ask("accept")
    total = int(there["bytes"])

    def bare(size: int) -> float:
        giver.say("send", size_bytes=size)
        seconds = float(taker.ask("receive", size_bytes=size))
        giver.hear()
        return seconds

    def pulled(which: str, version: int) -> Any:
        got = taker.ask("pull", which=which)
        if got["version"] != version:
            raise VerificationError(f"version {version} is offered, {got['version']} came")
        return got

    whole: list[tuple[float, float, int]] = []
    changes: list[tuple[float, float, int]] = []
    for turn in range(-_WARMING, rounds):
        step("warming up" if turn < 0 else f"round {turn + 1} of {rounds}")
        version = giver.ask("publish", changed=CHANGED)
        # What comes first after a version was published finds both processes otherwise than what comes next.
        raw_s = bare(total) if turn % 2 else 0.0
        got = pulled(WHOLE, version)
        whole.append((float(got["seconds"]), raw_s or bare(total), total))
        got = pulled(CHANGES, version)
        size = max(1, int(got["received_bytes"]))
        changes.append((float(got["seconds"]), bare(size), size))
    whole, changes = whole[_WARMING:], changes[_WARMING:]
    sums = giver.ask("sums")
    for which in (WHOLE, CHANGES):
        if taker.ask("sums", which=which) != sums:
            raise VerificationError(f"{which}: what came is not what was published")
    for side in (taker, giver):
        side.ask("close")
    of_whole = statistics.median([few[0] / all_[0] for few, all_ in zip(changes, whole, strict=True)])
    rows = [_row("whole version", whole, None), _row(f"{100 * CHANGED:g} % changed", changes, of_whole)]
    return {"machine": dict(facts(HostDevice())), "bytes": total, "rounds": rounds, "rows": rows}


def _row(name: str, found: Sequence[tuple[float, float, int]], of_whole: float | None) -> Row:
    seconds, raw_s, sizes = zip(*found, strict=True)
    return Row(name, int(statistics.median(sizes)), tuple(seconds), tuple(raw_s), of_whole)


def misses(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the goals that are missed, a sentence each."""
    whole, changed = rows
    assert changed.of_whole is not None
    if whole.of_raw < LEAST_OF_RAW:
        yield (
            f"a whole version comes at {whole.of_raw:.2f} of the rate of a bare socket, the goal is {LEAST_OF_RAW:g}"
        )
    if changed.of_whole > MOST_OF_WHOLE:
        yield (
            f"what has changed takes {changed.of_whole:.2f} of the time of a whole version, the goal is "
            f"{MOST_OF_WHOLE:g}"
        )


def _conclude(report: dict[str, Any], args: argparse.Namespace) -> int:
    """Print the table, write the JSON, and return the exit code."""
    rows: list[Row] = report["rows"]
    plain = {**report, "rows": [{**asdict(r), "median_s": r.median_s, "of_raw": r.of_raw} for r in rows]}
    write_result(args, "publish", plain, lambda: _show(report))
    missed = list(misses(rows)) if args.check else []
    for miss in missed:
        print(f"lowshard bench publish: {miss}", file=sys.stderr)
    return 1 if missed else 0


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from lowshard.plain_console import make_console, print_table

    console = make_console()
    for name, value in report["machine"].items():
        console.print(f"# {name}: {value}", soft_wrap=True)
    table = Table(title=f"between two processes over TCP, median of {report['rounds']} rounds")
    heads = ("way", "MB", "ms", "GB/s", "bare ms", "bare GB/s", "of bare", "x whole", "limit")
    for head in heads:
        table.add_column(head, justify="left" if head == "way" else "right")
    limits = (f"of bare >= {LEAST_OF_RAW:.2f}", f"x whole <= {MOST_OF_WHOLE:.2f}")
    for row, limit in zip(report["rows"], limits, strict=True):
        bare_s = statistics.median(row.raw_s)
        table.add_row(
            row.name,
            f"{row.bytes / 1e6:.1f}",
            f"{row.median_s * 1e3:.1f}",
            f"{row.bytes / row.median_s / 1e9:.2f}",
            f"{bare_s * 1e3:.1f}",
            f"{row.bytes / bare_s / 1e9:.2f}",
            f"{row.of_raw:.2f}",
            "" if row.of_whole is None else f"{row.of_whole:.2f}",
            limit,
        )
    print_table(console, table)
