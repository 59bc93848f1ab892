"""One collective at one size, in one placement: its buffers, the call that is timed, and the check of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from lowshard import dtypes
from lowshard.bench.turn_timing import Combine, Work
from lowshard.bench.value_pattern import Pattern, Segment, spoil
from lowshard.errors import LowshardError

Array = Any  # a NumPy or CuPy array
Placement = Literal["out-of-place", "in-place"]

ALL_REDOPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Operation:
    """One collective."""

    name: str
    reduces: bool = False
    rooted: bool = False
    out_of_place: bool = True
    in_place: bool = True
    whole_send: bool = True
    whole_recv: bool = True

    def sizes(self, size_bytes: int, itemsize: int, ranks: int) -> Sizes:
        """Return the elements of each buffer for a size; one element a part at least."""
        if self.name == "barrier":
            return Sizes(0, 0, 0, 0)
        parts = self.divides
        each = max(1, size_bytes // itemsize // (ranks if parts else 1))
        whole = each * ranks if parts else each
        send, recv = whole if self.whole_send else each, whole if self.whole_recv else each
        return Sizes(send, recv, each, whole * itemsize)

    @property
    def divides(self) -> bool:
        """Whether the larger buffer is made of a part for each rank."""
        return not (self.whole_send and self.whole_recv) or self.name.startswith("all_to_all")


@dataclass(frozen=True)
class Sizes:
    """Elements of a call."""

    send: int
    recv: int
    count: int
    size_bytes: int


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", reduces=True),
        Operation("all_gather", whole_send=False),
        Operation("reduce_scatter", reduces=True, whole_recv=False),
        Operation("all_to_all", in_place=False),
        Operation("all_to_all_v", in_place=False),
        Operation("broadcast", rooted=True, out_of_place=False),
        Operation("reduce", reduces=True, rooted=True),
        Operation("gather", rooted=True, whole_send=False),
        Operation("scatter", rooted=True, whole_recv=False),
        Operation("send_recv", in_place=False),
        Operation("barrier", in_place=False),
    )
}


@dataclass(frozen=True)
class Uneven:
    """One rank's counts and displacements of an uneven exchange."""

    send_counts: tuple[int, ...]
    send_displs: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_displs: tuple[int, ...]
    peer_displs: tuple[int, ...]


def uneven(each: int, rank: int, ranks: int) -> Uneven:
    """Return rank's part of an exchange in which parts are in turn a quarter larger and smaller than `each`."""
    skew = each // 4
    row = [each] * ranks
    for pair in range(ranks // 2):
        row[2 * pair] += skew
        row[2 * pair + 1] -= skew
    table = [row[-sender:] + row[:-sender] if sender else row for sender in range(ranks)]
    starts = [_starts(counts) for counts in table]
    mine, received = table[rank], [counts[rank] for counts in table]
    peers = tuple(start[rank] for start in starts)
    return Uneven(tuple(mine), tuple(starts[rank]), tuple(received), tuple(_starts(received)), peers)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]


DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"
)  # fmt: skip
"""What `-d all` goes through, in nccl-tests' order."""
MORE_DTYPES = ("int16", "uint16")
"""What can be asked for by name beside them; NCCL knows them as bytes only."""
TRANSPORTS = ("auto", "mpi", "loopback", "nccl", "staged")


@dataclass(frozen=True)
class Settings:
    """One sweep."""

    op: str
    sizes: tuple[int, ...]  # bytes of the larger of a rank's two buffers; (0,) for a barrier
    dtypes: tuple[str, ...] = ("float32",)
    redops: tuple[str, ...] = ()
    root: int = 0
    rounds: int = 20
    warmups: int = 5
    calls: int = 0  # in a timed batch; 0: as many as last two milliseconds
    checks: int = 1
    average: Combine = 3  # whose time counts: rank 0's, the average, the fastest's, the slowest's
    cycles: int = 1
    each: bool = False
    transport: str = "auto"
    window: bool = False
    order: str = "fast"
    compare_mpi: bool = False

    def __post_init__(self) -> None:
        if self.compare_mpi and self.transport not in ("auto", "mpi"):
            raise LowshardError(
                f"--compare-mpi times mpi4py on host memory beside --transport mpi; got {self.transport}"
            )

    @property
    def form(self) -> str:
        """Whether buffers are windows, where nothing else is unusual; "" else."""
        if self.order != "fast" or self.average != 3 or self.dtypes != ("float32",):
            return ""
        if self.redops not in ((), ("sum",)):
            return ""
        return "window" if self.window else ""

    def request(self, size_bytes: int, dtype: str, redop: str | None = None) -> Request:
        """Return what is called for a size, a type and a reduction."""
        return Request(self.op, size_bytes, dtype, redop, self.root, self.order, self.window)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings that `to_json` wrote, after a way through JSON."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Request:
    """What is called."""

    op: str
    size_bytes: int
    dtype: str
    redop: str | None = None
    root: int = 0
    order: str = "fast"
    window: bool = False

    @property
    def operation(self) -> Operation:
        """What is known of the collective."""
        return OPERATIONS[self.op]

    def sizes(self, ranks: int) -> Sizes:
        """Return the elements of its buffers."""
        return self.operation.sizes(self.size_bytes, dtypes.get(self.dtype).itemsize_bytes, ranks)

    def placements(self) -> tuple[Placement, ...]:
        """Return the placements in which the collective can be called."""
        can: dict[Placement, bool] = {
            "out-of-place": self.operation.out_of_place, "in-place": self.operation.in_place,
        }  # fmt: skip
        return tuple(p for p, possible in can.items() if possible)


class Case:
    """Buffers and call of a request."""

    def __init__(self, comm: Any, request: Request, placement: Placement) -> None:
        self.request, self.placement = request, placement
        self._comm = comm
        self._dtype = dtypes.get(request.dtype).numpy
        self._sizes = request.sizes(comm.size)
        self._uneven: Uneven | None = None
        if request.op == "all_to_all_v":
            self._uneven = uneven(self._sizes.count, comm.rank, comm.size)
        self.send, self.recv = self._buffers()
        self.run: Work = self._call()

    # ---- buffers

    def _buffers(self) -> tuple[Array | None, Array | None]:
        """Return this rank's send and receive buffer; in place the one lies within the other."""
        op, comm, sizes = self.request.op, self._comm, self._sizes
        root = comm.rank == self.request.root
        if op == "barrier":
            return None, None
        if op == "broadcast":
            buf = self._new(sizes.send)
            return buf, buf
        sends = op != "scatter" or root
        receives = op not in ("reduce", "gather") or root
        if self.placement == "out-of-place" or not (sends and receives):
            return self._new(sizes.send) if sends else None, self._new(sizes.recv) if receives else None
        whole = self._new(max(sizes.send, sizes.recv))
        if sizes.send == sizes.recv:
            return whole, whole
        each = sizes.count
        part = whole[each * comm.rank : each * (comm.rank + 1)]
        return (part, whole) if sizes.send < sizes.recv else (whole, part)

    def _new(self, elems: int) -> Array:
        if self.request.window:
            return self._comm.empty((elems,), self._dtype)
        if self._comm.xp is np:
            from lowshard.kernels.buffer import allocate

            return allocate((elems,), self._dtype, like=np.empty(0))
        return self._comm.xp.empty((elems,), self._dtype)

    # ---- calls

    def _call(self) -> Work:
        comm, request, send, recv = self._comm, self.request, self.send, self.recv
        reducing = {"op": request.redop, "order": request.order}
        rooted = {"root": request.root}
        spans = self._uneven
        calls: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: partial(comm.all_reduce, send, recv, **reducing),
            "all_gather": lambda: partial(comm.all_gather, send, recv),
            "reduce_scatter": lambda: partial(comm.reduce_scatter, send, recv, **reducing),
            "all_to_all": lambda: partial(comm.all_to_all, send, recv),
            "all_to_all_v": lambda: partial(
                comm.all_to_all_v, send, spans.send_counts, spans.send_displs,  # type: ignore[union-attr]
                recv, spans.recv_counts, spans.recv_displs,  # type: ignore[union-attr]
            ),
            "broadcast": lambda: partial(comm.broadcast, recv, **rooted),
            "reduce": lambda: partial(comm.reduce, send, recv, **reducing, **rooted),
            "gather": lambda: partial(comm.gather, send, recv, **rooted),
            "scatter": lambda: partial(comm.scatter, send, recv, **rooted),
            "send_recv": lambda: partial(_pass_on, comm, send, recv),
            "barrier": lambda: comm.barrier,
        }  # fmt: skip
        return calls[request.op]()

    # ---- checks

    def load(self, pattern: Pattern) -> None:
        """Write this rank's operand, and something else wherever a result is to come."""
        if self.recv is not None:
            spoil(self.recv)
        if self.send is not None and not (
            self.request.op == "broadcast" and self._comm.rank != self.request.root
        ):
            pattern.fill(self.send, self._comm.rank)

    def calm(self) -> None:
        """Make the operand of a reduction in place one that any number of calls leaves as it is."""
        if self.placement == "in-place" and self.request.redop is not None and self.send is not None:
            self.send.fill(0)

    def check(self, pattern: Pattern) -> int:
        """Load, call once, and return how many elements on this rank are wrong. Collective."""
        self.load(pattern)
        self.run()
        self.finish()
        return self.wrong(pattern)

    def wrong(self, pattern: Pattern) -> int:
        """Return how many elements of the result that is there now are wrong."""
        segments = self.segments()
        if not segments:
            return 0
        result = self.recv
        if result is None or result.size != sum(segment.count for segment in segments):
            return sum(segment.count for segment in segments)
        return pattern.wrong(result.reshape(-1), segments)

    def segments(self) -> tuple[Segment, ...]:
        """Return what this rank's result consists of."""
        op, rank, ranks = self.request.op, self._comm.rank, self._comm.size
        root, each, sizes = self.request.root, self._sizes.count, self._sizes
        if op == "barrier" or (op in ("reduce", "gather") and rank != root):
            return ()
        if op in ("all_gather", "gather"):
            return tuple(Segment(each * peer, each, peer) for peer in range(ranks))
        if op == "all_to_all":
            return tuple(Segment(each * peer, each, peer, each * rank) for peer in range(ranks))
        if self._uneven is not None:
            own = self._uneven
            return tuple(
                Segment(own.recv_displs[peer], own.recv_counts[peer], peer, own.peer_displs[peer])
                for peer in range(ranks)
            )
        if op in ("broadcast", "scatter"):
            return (Segment(0, sizes.recv, root, each * rank if op == "scatter" else 0),)
        if op == "send_recv":
            return (Segment(0, sizes.recv, (rank - 1) % ranks),)
        return (Segment(0, sizes.recv, None, each * rank if op == "reduce_scatter" else 0),)

    def finish(self) -> None:
        """Wait until the GPU has done what was called; on the host it has."""
        if self._comm.xp is not np:
            self._comm.xp.cuda.get_current_stream().synchronize()


def _pass_on(comm: Any, send: Array, recv: Array) -> None:
    """Send to the next rank and receive from the one before, at once."""
    if comm.size == 1:
        recv[...] = send
        return
    comm.send_recv(send, (comm.rank + 1) % comm.size, recv, (comm.rank - 1) % comm.size)
