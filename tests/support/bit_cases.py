"""Cases of the communicator contract: reductions in a fixed order are one fold, bit for bit, on every transport.

The operands are what floating point is hard on: zeros of both signs, infinities, NaNs, subnormals, values that
overflow or tie when they are rounded, and integers that wrap. The yardstick is lowshard.comm.reduction.fold itself.
Lengths lie on both sides of what fits a slot, a message and a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from support import mode
from support.comm_kit import case, get, lend, put, reducible, told

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.reduction import fold

Array = Any

OPS = ("sum", "avg", "min", "max", "prod")
ORDERS = ("tree", "rank")

PERIOD = 1021  # a prime: no block, slot or part is a multiple of it

# Bytes: what goes in one message, slots as they are or were, blocks of a fold.
EDGES = (4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10)


@cache
def hard_values(name: str) -> np.ndarray:
    """Return the special values of a dtype, and ordinary ones of all magnitudes among them."""
    row = dtypes.get(name)
    rng = np.random.default_rng(4)
    if row.kind == "bool":
        return rng.integers(0, 2, 61).astype(np.bool_)
    if row.kind in ("int", "uint"):
        info = np.iinfo(row.numpy)
        edge = [info.min, info.min + 1, 0, 1, info.max - 1, info.max, 2, 3]
        spread = rng.integers(info.min, info.max, 40, row.numpy, endpoint=True)
        return np.concatenate([np.array(edge, row.numpy), spread])
    bits = row.itemsize_bytes * 8
    kind = np.dtype(f"u{row.itemsize_bytes}")
    patterns = rng.integers(0, 1 << bits, 60, np.uint64).astype(kind)  # NaNs, subnormals and all the rest
    one = np.ones(1, row.numpy)
    below, above = (
        (one.view(kind) - kind.type(1)).view(row.numpy),
        (one.view(kind) + kind.type(1)).view(row.numpy),
    )
    few = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.0, np.inf, -np.inf, np.nan, -np.nan]).astype(row.numpy)
    smallest = np.arange(1, 5).astype(kind).view(row.numpy)  # subnormal
    infinite = np.array(np.inf).astype(row.numpy).view(kind)
    largest = (infinite.reshape(1) - kind.type(1)).view(
        row.numpy
    )  # of e4m3, which has no infinity, another NaN
    plain = (rng.standard_normal(60) * np.exp2(rng.integers(-6, 7, 60))).astype(row.numpy)
    zeros = np.array([0.0, -0.0] * 6).astype(row.numpy)  # where it shows which of two equal ones is taken
    specials = [few, below, above, smallest, -smallest, largest, -largest, zeros]
    return np.concatenate([*specials, plain, patterns.view(row.numpy)])


def hard_terms(rng: np.random.Generator, size: int, row: dtypes.DType) -> np.ndarray:
    """Return one period of every rank's operand, `[size, PERIOD]`."""
    values = hard_values(row.name)
    terms: np.ndarray = values[rng.integers(0, len(values), (size, PERIOD))]
    if row.kind == "float" and row.bits == 16 and size > 1:
        # Sums that lie half-way between two values of 16 bits: 1 + an odd multiple of half a step.
        step = 2.0**-10 if row.name == "float16" else 2.0**-7
        ties = np.arange(200) % 31
        terms[:, :200] = np.zeros((size, 200), row.numpy)
        terms[0, :200] = (1.0 + ties * step).astype(row.numpy)
        terms[size - 1, :200] = np.full(200, step / 2).astype(row.numpy)
    return terms


def folded(terms: np.ndarray, op: str, order: str) -> np.ndarray:
    """Return the fold of the operands."""
    out = np.empty_like(terms[0])
    with np.errstate(all="ignore"):
        fold(list(terms), out, op, order)
    return out


def is_nan_of(values: np.ndarray) -> np.ndarray:
    """Return which values are NaNs."""
    with np.errstate(all="ignore"):  # a signalling NaN is one that tells when it is converted
        return np.isnan(values.astype(np.float64))


def same_bits(buf: Array, period: np.ndarray, first: int, nan: np.ndarray) -> None:
    """Demand the elements of a periodic result from `first` on; of a NaN only that it is one.

    Which NaN comes out of two is the machine's affair, and the compiler's, which may swap operands.
    """
    got = get(buf).reshape(-1)
    kind = np.dtype(f"u{got.dtype.itemsize}")
    expected = np.resize(np.roll(period, -first), got.size)
    is_nan = np.resize(np.roll(nan, -first), got.size)
    wrong = np.flatnonzero((got.view(kind) != expected.view(kind)) & ~is_nan)
    if is_nan.any():
        strange = np.flatnonzero(~is_nan_of(got[is_nan]))
        assert not len(strange), f"{len(strange)} of {is_nan.sum()} NaNs are gone"
    assert not len(wrong), (
        f"{len(wrong)} of {got.size} elements differ; the first, at {wrong[0]}: got "
        f"{got[wrong[0]]!r} ({got.view(kind)[wrong[0]]:#x}), expected {expected[wrong[0]]!r} "
        f"({expected.view(kind)[wrong[0]]:#x})"
    )


def lengths(row: dtypes.DType, size: int, edge: int) -> int:
    """Return an element count at or beside an edge of all operands, or of one rank's part."""
    elems = edge // row.itemsize_bytes
    return elems * size if edge == 64 << 10 and row.bits >= 32 else elems


def variants(comm: Communicator, which: int) -> list[tuple[str, dtypes.DType, str, int]]:
    """Return (op, dtype, order, elements): all in a full run, else every second pair of op and dtype, once."""
    chosen = []
    edges = EDGES if comm.transport == "mpi" or mode.full() else EDGES[:2]  # slots and blocks are a node's
    for i, op in enumerate(OPS):
        for j, row in enumerate(reducible(comm, op)):
            if row.bits < 16 and row.kind == "float" and not mode.full():
                continue  # by the same exchange on all transports
            every = [(order, edge, delta) for order in ORDERS for edge in edges for delta in (-1, 0, 1)]
            if not mode.full():
                if (i + j + which) % 2:
                    continue
                every = [every[(7 * i + j + mode.seed()) % len(every)]]
            for order, edge, delta in every:
                chosen.append((op, row, order, max(1, lengths(row, comm.size, edge) + delta)))
    return chosen


def check_all(
    comm: Communicator,
    rng: np.random.Generator,
    which: int,
    call: Callable[[np.ndarray, int, str, str], tuple[Array, int]],
) -> None:
    """Run a reduction on hard operands and compare its bits.

    `call(operand, elements, op, order)` returns the result and the first element it holds.
    """
    for op, row, order, n in variants(comm, which):
        terms = hard_terms(rng, comm.size, row)
        period = folded(terms, op, order)
        nan = is_nan_of(period)
        with told(op=op, dtype=row, order=order, n=n), np.errstate(all="ignore"):
            buf, first = call(np.resize(terms[comm.rank], n), n, op, order)
            same_bits(buf, period, first % PERIOD, nan)


@case()
def all_reduce_has_the_bits_of_the_fold(comm: Communicator, rng: np.random.Generator) -> None:
    turn = 0

    def all_reduce(operand: np.ndarray, n: int, op: Any, order: Any) -> tuple[Array, int]:
        nonlocal turn
        turn += 1
        buf = (lend if turn % 2 else put)(comm, operand)
        recv = buf if (turn // 2 + comm.rank) % 3 == 0 else put(comm, np.zeros_like(operand))
        comm.all_reduce(buf, recv, op, order)
        return recv, 0

    check_all(comm, rng, 0, all_reduce)


@case()
def reduce_scatter_has_the_bits_of_the_fold(comm: Communicator, rng: np.random.Generator) -> None:
    turn = 0

    def reduce_scatter(operand: np.ndarray, n: int, op: Any, order: Any) -> tuple[Array, int]:
        nonlocal turn
        turn += 1
        part = max(1, n // comm.size)
        buf = (put if turn % 2 else lend)(comm, np.resize(operand, part * comm.size))
        own = buf[part * comm.rank : part * (comm.rank + 1)]
        recv = own if (turn // 2 + comm.rank) % 3 == 0 else put(comm, np.zeros(part, operand.dtype))
        comm.reduce_scatter(buf, recv, op, order)
        return recv, part * comm.rank

    check_all(comm, rng, 1, reduce_scatter)


@case()
def reduce_has_the_bits_of_the_fold(comm: Communicator, rng: np.random.Generator) -> None:
    turn = 0

    def reduce(operand: np.ndarray, n: int, op: Any, order: Any) -> tuple[Array, int]:
        nonlocal turn
        turn += 1
        root = turn % comm.size
        buf = (lend if (turn + comm.rank) % 2 else put)(comm, operand)
        recv = put(comm, np.zeros_like(operand)) if comm.rank == root else None
        comm.reduce(buf, recv, op, root, order)
        if comm.rank == root:
            return recv, 0
        return comm.xp.zeros(0, operand.dtype), 0

    check_all(comm, rng, 2, reduce)


@case()
def shared_reductions_have_the_bits_of_the_fold(comm: Communicator, rng: np.random.Generator) -> None:
    turn = 0

    def shared(operand: np.ndarray, n: int, op: Any, order: Any) -> tuple[Array, int]:
        nonlocal turn
        turn += 1
        buf = (lend if turn % 3 else put)(comm, operand)
        return comm.all_reduce(buf, op=op, order=order, shared=True), 0

    check_all(comm, rng, 3, shared)


@case()
def the_place_of_an_element_does_not_show_in_its_bits(comm: Communicator, rng: np.random.Generator) -> None:
    """One pair of values at every place: in vectors, behind the last one, in blocks, parts and messages."""
    for name in ("float32", "bfloat16"):
        row = dtypes.get(name)
        for op in ("min", "max", "sum"):
            values = np.array([0.0, -0.0, 1.5, -0.0, 0.0, np.inf, 2.0**-149, -(2.0**-149)]).astype(row.numpy)
            mine = values[(np.arange(8) + 3 * comm.rank) % 8]
            terms = np.stack([values[(np.arange(8) + 3 * r) % 8] for r in range(comm.size)])
            for i, n in enumerate((1, 3, 17, 33, 1025, 20_003)):
                shift, order = n % 8, ORDERS[i % 2]
                with told(dtype=name, op=op, n=n, order=order), np.errstate(all="ignore"):
                    recv = put(comm, np.zeros(n, row.numpy))
                    comm.all_reduce(put(comm, np.resize(np.roll(mine, shift), n)), recv, op, order)  # type: ignore[arg-type]
                    period = folded(np.roll(terms, shift, 1), op, order)
                    same_bits(recv, period, 0, is_nan_of(period))
