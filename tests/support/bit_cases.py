"""Cases of the communicator contract: reductions in a fixed order are one fold, bit for bit, on every transport.

The operands are what floating point is hard on, ties where a sum is rounded among it, and integers that wrap.
Lengths lie on both sides of what fits a slot, a message and a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support import mode
from support.comm_kit import case, lend, put, reducible, told

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.selftest.arrays import hard
from lowshard.selftest.comparisons import difference
from lowshard.selftest.fold_cases import OPS, plain_fold

Array = Any

ORDERS = ("tree", "rank")

PERIOD = 1021  # a prime: no block, slot or part is a multiple of it

# Bytes: what goes in one message, slots as they are or were, blocks of a fold.
EDGES = (4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10)


def hard_terms(rng: np.random.Generator, size: int, row: dtypes.DType) -> np.ndarray:
    """Return one period of every rank's operand, `[size, PERIOD]`."""
    terms = hard((size, PERIOD), row.name, int(rng.integers(1 << 30)))
    if row.kind == "float" and row.bits == 16 and size > 1:
        # Sums that lie half-way between two values of 16 bits: 1 + an odd multiple of half a step.
        step = 2.0**-10 if row.name == "float16" else 2.0**-7
        ties = np.arange(200) % 31
        terms[:, :200] = np.zeros((size, 200), row.numpy)
        terms[0, :200] = (1.0 + ties * step).astype(row.numpy)
        terms[size - 1, :200] = np.full(200, step / 2).astype(row.numpy)
    return terms


def same_bits(buf: Array, period: np.ndarray, first: int = 0) -> None:
    """Demand the elements of a periodic result from `first` on; of a NaN only that it is one.

    Which NaN comes out of two is the machine's affair, and the compiler's, which may swap operands.
    """
    how = difference(buf, np.resize(np.roll(period, -first), buf.shape), any_nan=True)
    assert not how, how


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
        period = plain_fold(terms, op, order)
        with told(op=op, dtype=row, order=order, n=n), np.errstate(all="ignore"):
            buf, first = call(np.resize(terms[comm.rank], n), n, op, order)
            same_bits(buf, period, first % PERIOD)


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
                    same_bits(recv, plain_fold(np.roll(terms, shift, 1), op, order))
