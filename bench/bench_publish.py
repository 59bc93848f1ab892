"""`lowshard bench publish`: versions from a publisher to a subscriber over TCP, beside a bare socket.

Each of its two processes is `python -m lowshard.bench.bench_publish giver|taker`: it reads what to do from stdin, a
line of JSON, answers so, and ends with its stdin. The bare socket goes from memory to memory, without a checksum; the
side that receives says when, by a byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lowshard import dtypes
from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import HostDevice, require_memory
from lowshard.bench.bench_limits import OF_BARE, OF_WHOLE
from lowshard.bench.bench_report import Beside, Limit, Report, Row, Spread
from lowshard.bench.bench_world import Progress, job_size
from lowshard.bench.machine import facts
from lowshard.bench.turn_timing import Runner, ToldClock, take_turns
from lowshard.checkpoint.catalog import crc32
from lowshard.errors import LowshardError, VerificationError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Replicated

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
            [sys.executable, "-m", "lowshard.bench.bench_publish", kind],
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


# ---- the two processes

HOST = "127.0.0.1"
TENSORS, COLUMNS = 16, 2048
WHOLE, CHANGES = "whole", "changes"
_LIMIT_S = 60.0


def layouts_of(size_bytes: int) -> dict[str, Layout]:
    """Return bf16 weights of about so many bytes, which one rank holds whole."""
    rows = max(1, size_bytes // (2 * COLUMNS * TENSORS))
    layout = Layout(DeviceMesh((1,), ("x",)), (rows, COLUMNS), "bfloat16", (Replicated(),))
    return {f"w{i}": layout for i in range(TENSORS)}


def _arrays(layouts: Mapping[str, Layout]) -> dict[str, np.ndarray]:
    dtype = dtypes.get("bfloat16").numpy
    found = {name: np.empty(layout.local_shape(0), dtype) for name, layout in layouts.items()}
    for array in found.values():
        array.view(np.uint16)[...] = 0x3F80
    return found


def _sums(arrays: Mapping[str, Any]) -> list[int]:
    return [crc32(array.reshape(-1).view(np.uint8).data) for array in arrays.values()]


class Giver:
    """The side that publishes, and sends over a bare socket."""

    def open(self, size_bytes: int, token: str) -> dict[str, Any]:
        """Make a publisher and a socket that listens; return where they are, and how many bytes a version has."""
        from lowshard.reshard import Publisher

        layouts = layouts_of(size_bytes)
        self._arrays = _arrays(layouts)
        self._rng, self._version = np.random.default_rng(1), 0
        self._publisher = Publisher(
            layouts, self._arrays, address=f"tcp://{HOST}:0", token=bytes.fromhex(token)
        )
        self._listens = socket.create_server((HOST, 0))
        total = sum(array.nbytes for array in self._arrays.values())
        self._memory = np.ones(total, np.uint8)
        return {
            "address": self._publisher.address,
            "port": self._listens.getsockname()[1],
            "bytes": total,
        }

    def accept(self) -> None:
        """Take the bare connection."""
        self._socket, _ = self._listens.accept()

    def publish(self, changed: float) -> int:
        """Flip the lowest bit of about so great a share of the elements, and publish a version; return its number."""
        for array in self._arrays.values():
            flat = array.reshape(-1).view(np.uint16)
            at = np.unique(self._rng.integers(flat.size, size=round(changed * flat.size)))
            flat[at] ^= 1
        self._version += 1
        self._publisher.publish(self._version)
        return self._version

    def send(self, size_bytes: int) -> None:
        """Send so many bytes over the bare connection, once the other side asks for them."""
        self._socket.recv(1)
        self._socket.sendall(self._memory[:size_bytes].data)

    def sums(self) -> list[int]:
        """Return a checksum of each tensor."""
        return _sums(self._arrays)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close(0.0)


class Taker:
    """The side that subscribes, and receives over a bare socket."""

    def open(self, size_bytes: int, address: str, token: str, port: int) -> None:
        """Make two subscribers, one of which takes versions whole, and the bare connection."""
        from lowshard.reshard import Subscriber

        layouts = layouts_of(size_bytes)
        deltas: dict[str, Literal["auto", "off"]] = {WHOLE: "off", CHANGES: "auto"}
        self._taking = {
            name: Subscriber(
                layouts, _arrays(layouts), address=address, token=bytes.fromhex(token), delta=delta, name=name
            )
            for name, delta in deltas.items()
        }
        self._socket = socket.create_connection((HOST, port))
        self._memory = np.ones(sum(array.nbytes for array in _arrays(layouts).values()), np.uint8)

    def pull(self, which: str) -> dict[str, Any]:
        """Take the version that is offered; return the seconds that took, and the bytes that came."""
        taking = self._taking[which]
        begin_s = time.perf_counter()
        version = taking.pull(_LIMIT_S)
        seconds = time.perf_counter() - begin_s
        return {"version": version, "seconds": seconds, **taking.report()}

    def receive(self, size_bytes: int) -> float:
        """Receive so many bytes over the bare connection; return the seconds that took."""
        begin_s, got = time.perf_counter(), 0
        self._socket.sendall(b"x")
        while got < size_bytes:
            count = self._socket.recv_into(self._memory[got:size_bytes].data, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the other side has gone")
            got += count
        return time.perf_counter() - begin_s

    def sums(self, which: str) -> list[int]:
        """Return a checksum of each tensor of a subscriber's version."""
        return _sums(self._taking[which].weights)

    def close(self) -> None:
        """End the subscribers."""
        for taking in self._taking.values():
            taking.close()


def main(kind: str) -> None:
    """Do what comes over stdin, until it ends."""
    side = {"giver": Giver, "taker": Taker}[kind]()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(side, asked.pop("do"))(**asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
