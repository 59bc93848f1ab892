"""What the cases of the communicator contract share: data, canaries, comparison, a plain reference fold.

Every case gets the same generator on every rank and draws the data of all ranks from it, so each rank
can say by itself what it must receive. One call of each collective and the plain fold are the selftest's.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from support import mode

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.foreign_array import host_of as get
from lowshard.selftest.collective_cases import CollectiveCall, CollectiveCalls
from lowshard.selftest.comparisons import difference
from lowshard.selftest.fold_cases import plain_fold

Array = Any
Case = Callable[[Communicator, np.random.Generator], None]

CASES: dict[str, Case] = {}
"""The communicator contract; see support.comm_cases."""
PROGRAMS: dict[str, Case] = {}
"""What programs do with a communicator; see support.program_cases."""

GUARD_ELEMS = 4

# The relative rounding error of one operation.
EPS = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """What cases ask of a communicator before they are run on it.

    Attributes:
        size: its ranks.
        transport: "node" is the memory of one node beside MPI, "mpi" any other communicator over MPI.
        on_gpu: whether its arrays are CuPy's.
        compares: whether its ranks compare what they ask for.
        late: whether they do so after the call.
    """

    size: int
    transport: Literal["loopback", "node", "mpi", "nccl", "staged"]
    on_gpu: bool = False
    compares: bool = True
    late: bool = False


Need = Callable[[Way], bool]
_NEEDS: dict[str, tuple[Need, ...]] = {}


def case(*needs: Need, table: dict[str, Case] = CASES) -> Callable[[Case], Case]:
    """Enter a function into a table under its own name, for the ways that give all it needs."""

    def enter(function: Case) -> Case:
        assert function.__name__ not in _NEEDS
        table[function.__name__], _NEEDS[function.__name__] = function, needs
        return function

    return enter


def cases_for(way: Way, names: Iterable[str] | None = None) -> list[str]:
    """Return those of the cases, by default of all of the contract, that mean something on a way."""
    return [name for name in (CASES if names is None else names) if all(need(way) for need in _NEEDS[name])]


def run_case(name: str, comm: Communicator) -> None:
    """Run one case on this rank.

    Collective: all ranks of the communicator call this. The generator is the same on all ranks.
    """
    (CASES | PROGRAMS)[name](comm, mode.rng(name))


def others(way: Way) -> bool:
    """One rank has no other."""
    return way.size > 1


def compared(way: Way) -> bool:
    """Ranks tell each other what they ask for."""
    return way.size > 1 and way.compares


def compared_before(way: Way) -> bool:
    """Nothing moves where ranks differ, and they go on afterwards. Late comparison gives the communicator up."""
    return not way.late


def by_the_host(way: Way) -> bool:
    """NCCL's kernels run in the order of the device's streams, and do not tell of lengths that differ."""
    return way.transport != "nccl"


def numpy_arrays(way: Way) -> bool:
    """CuPy has no read-only arrays, and the host cannot look at them."""
    return not way.on_gpu


def memory_of_a_node(way: Way) -> bool:
    """Groups share memory, and the memory of dropped results is used again."""
    return way.transport == "node"


def one_memory(way: Way) -> bool:
    """Ranks see one memory: threads, and processes of a node beside MPI."""
    return way.transport in ("loopback", "node")


@contextmanager
def told(**facts: object) -> Iterator[None]:
    """Add to an error which of the many variants of a case it belongs to."""
    try:
        yield
    except Exception as error:
        error.add_note(", ".join(f"{k}={v}" for k, v in facts.items()))
        raise


def outcome(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the text of what a call raises, or two empty strings."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refused(call: Callable[[], object], cls: type[Exception], *patterns: str) -> None:
    """Demand that a call raises exactly this class, with a text in which every pattern is found."""
    name, text = outcome(call)
    assert name, f"it was not refused; {cls.__name__} was expected"
    assert name == cls.__name__, f"expected {cls.__name__}, got {name}: {text}"
    for pattern in patterns:
        assert re.search(pattern, text), f"the text has no {pattern!r}: {text}"


# ---- buffers


def carried(comm: Communicator) -> list[dtypes.DType]:
    """Return the dtypes that arrays of the communicator's module can have."""
    rows = dtypes.all_dtypes()
    # CuPy makes no fp8 or e8m0 arrays; they are uint8 there.
    return [r for r in rows if comm.xp is np or not (r.is_float8 or r.kind == "scale")]


def reducible(comm: Communicator, op: str) -> list[dtypes.DType]:
    """Return the dtypes that `op` is defined for."""
    return [r for r in carried(comm) if r.kind != "scale" and not (r.kind == "bool" and op == "avg")]


def put(comm: Communicator, data: np.ndarray) -> Array:
    """Return a fresh buffer of the communicator's module that holds data."""
    return comm.xp.array(data) if comm.xp is not np else np.array(data, order="C", copy=True)


def lend(comm: Communicator, data: np.ndarray) -> Array:
    """Return a buffer in memory of the communicator's `empty` that holds data."""
    buf = comm.empty(data.shape, data.dtype)
    buf[...] = put(comm, data)
    return buf


class Canvas:
    """A buffer between two canaries, all of one byte value, so that stray writes are seen."""

    BYTE = 0xA5

    def __init__(self, comm: Communicator, elems: int, dtype: np.dtype[Any], lent: bool = False) -> None:
        blank = self._blank(elems + 2 * GUARD_ELEMS, dtype)
        self._all = lend(comm, blank) if lent else put(comm, blank)
        self.buf = self._all[GUARD_ELEMS : GUARD_ELEMS + elems]

    @classmethod
    def _blank(cls, elems: int, dtype: np.dtype[Any]) -> np.ndarray:
        byte = 1 if dtype == np.bool_ else cls.BYTE
        return np.full(elems * dtype.itemsize, byte, np.uint8).view(dtype)

    def check(self, expected: np.ndarray) -> None:
        """Demand `expected` in the buffer and nothing around it."""
        same(self.buf, expected)
        self.check_canaries()

    def check_canaries(self) -> None:
        content = get(self._all)
        blank = self._blank(GUARD_ELEMS, content.dtype)
        assert content[:GUARD_ELEMS].tobytes() == blank.tobytes(), "written before the buffer"
        assert content[len(content) - GUARD_ELEMS :].tobytes() == blank.tobytes(), "written behind the buffer"

    @classmethod
    def blank(cls, elems: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return what an untouched buffer holds."""
        return cls._blank(elems, dtype)


def same(buf: Array, expected: np.ndarray) -> None:
    """Demand equal dtype, shape and bits."""
    how = difference(buf, expected)
    assert not how, how


# ---- data


def random_bits(rng: np.random.Generator, shape: Sequence[int], row: dtypes.DType) -> np.ndarray:
    """Return an array of any bit patterns at all (NaNs too), for what is moved and not computed with."""
    count = int(np.prod(shape, dtype=np.int64))
    data = rng.integers(0, 256, count * row.itemsize_bytes, np.uint8)
    if row.kind == "bool":
        data &= 1
    return data.view(row.numpy).reshape(tuple(shape))


def operands(rng: np.random.Generator, size: int, elems: int, row: dtypes.DType, op: str) -> np.ndarray:
    """Return one operand a rank, `[size, elems]`, for which no result overflows."""
    if row.kind == "bool":
        return rng.integers(0, 2, (size, elems)).astype(np.bool_)
    if row.kind in ("int", "uint"):
        low = -15 if row.kind == "int" else 0
        data = rng.integers(low, 16, (size, elems))
        if op == "prod":
            data[:3] = rng.integers(low // 5, 4, data[:3].shape)
            data[3:] = 1 - 2 * (rng.integers(0, 2, data[3:].shape) if row.kind == "int" else 0)
        return data.astype(row.numpy)
    if op == "prod":
        return (1.0 + rng.standard_normal((size, elems)) / 8).astype(row.numpy)
    values = rng.standard_normal((size, elems))
    if row.bits >= 32:  # magnitudes so different that the order of additions shows in the bits
        values *= np.exp2(rng.integers(-12, 12, (size, elems)))
    return values.astype(row.numpy)


# ---- one call of every collective

SHORT, LONG = 37, 5096
"""Elements of 4 bytes: rows of these go through the slots of a node, or straight from buffer to buffer."""


def calls_of(
    comm: Communicator, rng: np.random.Generator, *, elems: int, lent: bool = False, in_place: bool = False
) -> CollectiveCalls:
    """Return what makes calls of small whole numbers in float32: sums in any order are exact."""
    pool = rng.integers(-50, 50, 10007).astype(np.float32)  # a prime: no part is as long

    def draw(shape: tuple[int, ...], dtype: str, *words: object) -> np.ndarray:
        return np.resize(np.roll(pool, zlib.crc32(repr(words).encode())), shape)

    return CollectiveCalls(comm, "float32", elems, in_place, draw, partial(lend if lent else put, comm))


def every_call(
    comm: Communicator, rng: np.random.Generator, *, elems: int, lent: bool = False, in_place: bool = False
) -> list[CollectiveCall]:
    """Return one call of each collective that has buffers."""
    made, last = calls_of(comm, rng, elems=elems, lent=lent, in_place=in_place), comm.size - 1
    reductions = made.make("all_reduce"), made.make("all_reduce", 0, "max", "fast"), made.make("reduce", last)
    return [*made.moves([last]), *reductions, made.make("reduce_scatter", 0, "min", "rank")]


def check(call: CollectiveCall) -> None:
    """Demand the right content of all buffers of a call that is over."""
    call.check(lambda what, buf, expected: same(buf, expected))


# ---- reductions


def check_reduced(buf: Array, terms: np.ndarray, op: str, order: str) -> None:
    """Demand the plain fold's bits for a fixed order, and a result within rounding for "fast"."""
    row = dtypes.get(terms.dtype)
    if order != "fast" or row.kind != "float":
        same(buf, plain_fold(terms, op, order))
        return
    got = get(buf)
    assert got.dtype == terms.dtype
    exact = plain_fold(terms.astype(np.float64), op, "rank")
    # Each of the additions rounds a partial sum; the last rounding is to the dtype itself.
    size_of_terms = np.abs(terms.astype(np.float64)).sum(0) if op in ("sum", "avg") else np.abs(exact)
    accumulator = EPS["float64"] if row.bits == 64 else EPS["float32"]
    allowed = 2 * len(terms) * accumulator * size_of_terms + EPS[row.name] * np.abs(exact)
    if op in ("min", "max"):
        allowed = np.zeros_like(exact)
    if row.bits < 16:  # fp8: results may be subnormal
        allowed += 2.0**-9 if row.name == "float8_e4m3fn" else 2.0**-16
    wrong = np.flatnonzero(~(np.abs(got.astype(np.float64) - exact) <= allowed))
    assert not len(wrong), (
        f"{len(wrong)} of {exact.size} are off by more than rounding; at {wrong[0]}: got {got[wrong[0]]!r}, "
        f"expected {exact[wrong[0]]!r}"
    )


def equal_everywhere(comm: Communicator, text: str) -> bool:
    """Return whether all ranks hold one text, by a collective that moves fixed-size digests."""
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8).copy()
    recv = put(comm, np.zeros((comm.size, 32), np.uint8))
    comm.all_gather(put(comm, mine), recv)
    return len({row.tobytes() for row in get(recv)}) == 1
