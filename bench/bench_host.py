"""`lowshard bench host`: what a collective on GPU arrays costs this process before NCCL has it, with NCCL left out.

NCCL is a stand-in whose calls do nothing, as do CUDA's questions for the current device and for a capture, so the
figures need no GPU. Arrays are CuPy's where
it is installed (over made-up addresses, never read), else NumPy's, whose addresses cost more to ask for. Calls are
compared late, as they are beside a communicator of the host; the other ranks agree at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowshard.bench.bench_device import HostDevice
from lowshard.bench.bench_progress import Progress
from lowshard.bench.json_argument import add_json_argument, write_result
from lowshard.comm import Communicator
from lowshard.comm.loopback import Board, LoopbackTransport
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.errors import BufferMismatchError
from lowshard.flag_value import count_of

Array = Any

DESCRIPTION = """\
Times collectives of a communicator over NCCL on this process alone, with a stand-in for NCCL whose calls do nothing.
Every row is compared with the same calls of the stand-in made directly, in the same rounds.
"""
EPILOG = """\
Columns: NCCL's calls a collective makes; microseconds of the collective, of the bare calls, and the difference, medians
over the rounds; the limit of the difference, if any. The launches of NCCL and of CUDA are in none of them.
Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
LIMITS_US = {"all_reduce": 10.0, "all_gather": 25.0, "all_to_all": 60.0}
ELEMS = 1 << 16
_A_ROUND = 200
_COLLECTIVES = 6
_FAR = 1 << 40
"""An address that no array of this process has."""


@dataclass(frozen=True)
class HostRow:
    """One collective."""

    name: str
    calls: int
    whole_us: float
    bare_us: float
    above_us: float

    @property
    def miss(self) -> str:
        """What is above its limit, or ""."""
        limit = LIMITS_US.get(self.name)
        if limit is None or self.above_us <= limit:
            return ""
        return f"{self.name}: {self.above_us:.1f} us above the bare calls, limit {limit:g}"


class StillNCCL:
    """The module `cupy.cuda.nccl` and a communicator of it, as far as collectives need them; nothing happens."""

    NcclError = RuntimeError

    def __init__(self, size: int) -> None:
        self._size = size
        self.made: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        """The calls that were made, once this is a list."""

    def rank_id(self) -> int:
        """Return 0."""
        return 0

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def device_id(self) -> int:
        """Return 0."""
        return 0

    def check_async_error(self) -> None:
        """Find nothing."""

    def _call(self, *args: Any) -> None:
        if self.made is not None:
            self.made.append((self._call, args))

    groupStart = groupEnd = allReduce = reduceScatter = allGather = broadcast = send = recv = _call


def still_communicator(size: int) -> tuple[Communicator, StillNCCL, Callable[[int], Array]]:
    """Return rank 0 of a communicator of which nothing moves, its stand-in, and what makes float32 arrays for it."""
    nccl = StillNCCL(size)
    stream = SimpleNamespace(ptr=7)
    xp, array, pointer, device = _arrays()

    def nothing(*args: Any) -> None:
        nccl._call(*args)

    binding = Binding(
        nccl=nccl, xp=xp, stream=lambda device_id=0: stream, on_stream=lambda stream, device: nullcontext(),
        new_stream=lambda: stream, new_event=SimpleNamespace, check=lambda stream: None,
        capturing=lambda stream: False, keep_memory=lambda kept: nullcontext(), cuda_error=RuntimeError,
        pointer=pointer, device=device, current=lambda: 0, select=nothing, synchronize=nothing,
        lock=lambda array: nothing, fetch=nothing, store=nothing, copy=nothing,
    )  # fmt: skip
    beside = _agreeing(size)
    comm = nccl_communicator(nccl, 0, size, beside, late=True, binding=binding, owned=False)
    return comm, nccl, array


def _agreeing(size: int) -> Communicator:
    """Return a communicator of the host whose other ranks are not there, and agree to everything."""
    over = LoopbackTransport(Board(size, 1.0, range(size)), 0)
    over.compare = lambda signature: True  # type: ignore[method-assign]
    over.split = lambda color, key: over  # type: ignore[method-assign]
    return Communicator(over)


def _arrays() -> tuple[Any, Callable[[int], Array], Callable[[Array], int], Callable[[Array], int]]:
    """Return an array module, what makes an array of it, what gives an array's address, and what its device."""
    try:
        import cupy
    except ImportError:
        return (
            np,
            lambda elems: np.empty(elems, np.float32),
            lambda array: int(array.ctypes.data),
            lambda _: 0,
        )
    taken = [_FAR]

    def array(elems: int) -> Array:
        taken[0] += 4 * elems
        memory = cupy.cuda.UnownedMemory(taken[0] - 4 * elems, 4 * elems, None, 0)
        return cupy.ndarray((elems,), np.float32, cupy.cuda.MemoryPointer(memory, 0))

    # As Binding.load has them.
    return cupy, array, lambda array: int(array.data.ptr), lambda array: int(array.device.id)


def measure(size: int, rounds: int, step: Callable[[str], object] = lambda what: None) -> list[HostRow]:
    """Return the figures of each collective among so many ranks; `step` is told each one's name."""
    comm, nccl, array = still_communicator(size)
    whole, part = array(ELEMS * size), array(ELEMS)
    other = array(ELEMS * size)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(whole, whole),
        "all_reduce apart": lambda: comm.all_reduce(whole, other),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, part),
        "all_gather": lambda: comm.all_gather(part, whole),
        "all_to_all": lambda: comm.all_to_all(whole, other),
        "broadcast": lambda: comm.broadcast(whole),
    }
    rows = []
    for name, run in work.items():
        step(name)
        rows.append(_row(name, run, nccl, rounds))
    return rows


def _row(name: str, run: Callable[[], object], nccl: StillNCCL, rounds: int) -> HostRow:
    run()
    nccl.made = []
    run()
    made, nccl.made = nccl.made, None

    def bare() -> None:
        for function, args in made:
            function(*args)

    pairs = [(_each_us(run), _each_us(bare)) for _ in range(rounds)]
    above = statistics.median(whole - alone for whole, alone in pairs)
    whole_us, bare_us = (statistics.median(column) for column in zip(*pairs, strict=True))
    return HostRow(name, len(made), whole_us, bare_us, above)


def _each_us(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(_A_ROUND):
        run()
    return (time.perf_counter() - start) / _A_ROUND * 1e6


def add_host_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `host`."""
    parser = benches.add_parser(
        "host",
        help="host time of collectives on GPU arrays, without a GPU",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=count_of, default=8, metavar="N", help="ranks (default 8)")
    parser.add_argument("--rounds", type=count_of, default=25, metavar="N", help="rounds (default 25)")
    add_json_argument(parser)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a figure misses its limit")
    parser.set_defaults(func=run_host)


def run_host(args: argparse.Namespace) -> int:
    """Run `lowshard bench host` and return the exit code."""
    need, free = 8 * ELEMS * args.ranks, HostDevice().free_bytes()
    if free is not None and need > free:
        raise BufferMismatchError(
            f"the arrays of {args.ranks} ranks take {need:,} bytes, {free:,} are free; pass a smaller -n"
        )
    with Progress("host") as progress:
        progress.expect(_COLLECTIVES)
        rows = measure(args.ranks, args.rounds, progress.step)
    about = {"ranks": args.ranks, "arrays": _arrays()[0].__name__}
    write_result(args, "host", {**about, "rows": [asdict(row) for row in rows]}, lambda: _show(rows, about))
    misses = [row.miss for row in rows if row.miss]
    if args.check and misses:
        for miss in misses:
            print(f"lowshard bench host: {miss}", file=sys.stderr)
        return 1
    return 0


def _show(rows: list[HostRow], about: dict[str, Any]) -> None:
    from rich.table import Table

    from lowshard.plain_console import make_console, print_table

    table = Table(title=f"{about['ranks']} ranks, {about['arrays']} arrays, microseconds of the host, median")
    for name in ("collective", "NCCL calls", "whole", "bare calls", "above", "limit"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for row in rows:
        figures = [f"{us:.1f}" for us in (row.whole_us, row.bare_us, row.above_us)]
        table.add_row(row.name, str(row.calls), *figures, f"{LIMITS_US.get(row.name, '')}")
    print_table(make_console(), table)
