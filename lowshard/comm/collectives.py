"""The table of collectives: of each, what its arguments must be, what it is called, counted and compared by, its plan.

A collective is one record of `COLLECTIVES`, which works over any transport: its plan uses the primitives alone. A
transport that knows a better way declares a plan of its own under the collective's name. `Communicator.call` makes a
call of any record, and so does `Communicator.start.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from lowshard.comm import check
from lowshard.comm.call import Call
from lowshard.comm.call_comparison import verify_counts
from lowshard.comm.reduction import divide, fold
from lowshard.comm.transport import Run, Transport
from lowshard.errors import BufferMismatchError, CommError

Array = Any  # a NumPy or CuPy array; CuPy ships no types

# Below this a reduction gathers whole operands and folds them locally: one message instead of two.
_ONE_MESSAGE_BYTES = 4096


class Asked(NamedTuple):
    """What a call asks for, its arguments being right.

    Attributes:
        dtype: of the elements.
        elems: that the plan is made for.
        sent_bytes: of this rank's elements that other ranks get, once for each of them.
        received_bytes: of others' that this rank gets.
        detail: what the plan takes beside; None where it is what the caller gave.
    """

    dtype: Any
    elems: int
    sent_bytes: int
    received_bytes: int
    detail: tuple[Any, ...] | None = None


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective, on any transport.

    Attributes:
        name: as counted, recorded, and as the communicator's method is called.
        text: what all ranks must ask for alike, from send, recv and the detail, once these are checked.
        check: returns what is asked for, from the transport, send, recv and the detail, or raises what is wrong.
        plan: returns the run of a call over the primitives, from the transport, the call, dtype, elements and detail.
        arrays: names of the arguments send and recv, for errors.
    """

    name: str
    text: Callable[..., str]
    check: Callable[..., Asked]
    plan: Callable[..., Run]
    arrays: tuple[str, str] = ("send", "recv")


def planned(t: Transport, what: Collective, call: Call, dtype: Any, elems: int, *detail: Any) -> Run:
    """Return the run of a call: by the transport's own plan, else by the table's."""
    fast = t.plans.get(what.name)
    run = None if fast is None else fast(t, call, dtype, elems, *detail)
    return what.plan(t, call, dtype, elems, *detail) if run is None else run


# ---- arguments


def text_of(buf: Array) -> str:
    """Return dtype and elements of a buffer as text: float32[1024]."""
    return f"{buf.dtype.name}[{buf.size}]"


def cut(t: Transport, elems: int) -> tuple[list[int], list[int]]:
    """Return the balanced split of elements over ranks as counts and displacements."""
    base, rem = divmod(elems, t.size)
    counts = [base + (rank < rem) for rank in range(t.size)]
    return counts, [0, *accumulate(counts[:-1])]


def is_rank(t: Transport, root: int) -> None:
    """Raise CommError unless this is a rank."""
    if type(root) is not int or not 0 <= root < t.size:
        raise CommError(f"root is a rank of the communicator, 0 to {t.size - 1}, got {root}")


def _pair(t: Transport, send: Array, recv: Array | None) -> tuple[Array, Array]:
    if recv is None:
        raise BufferMismatchError("recv is an array for the result, got None; pass one")
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    check.same_dtype(s, r)
    return s, r


def _at_root(t: Transport, buf: Array | None, name: str, root: int, like: Array, elems: int) -> Array | None:
    """Return the buffer that root alone passes, flat; None on the others."""
    if t.rank != root:
        return None
    if buf is None:
        raise BufferMismatchError(f"root (rank {root}) passes {name}, got None")
    flat = t.buffers.flat(buf, name, writes=name == "recv")
    check.same_dtype(like, flat)
    check.need(flat.size == elems, name, f"root's {name} holds {elems} elements", elems, flat.size)
    return flat


def _check_all_gather(t: Transport, send: Array, recv: Array | None) -> Asked:
    s, r = _pair(t, send, recv)
    whole = s.size * t.size
    check.need(r.size == whole, "all_gather", "recv holds size x send elements", whole, r.size)
    moved = s.nbytes * (t.size - 1)
    return Asked(s.dtype, s.size, moved, moved)


def _check_all_gather_v(
    t: Transport, send: Array, recv: Array, recv_counts: Sequence[int], recv_displs: Sequence[int]
) -> Asked:
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    check.same_dtype(s, r)
    counts, displs = check.spans("recv", t.size, r, recv_counts, recv_displs)
    own, rule = counts[t.rank], "send holds its own recv_counts entry"
    check.need(s.size == own, "all_gather_v", rule, own, s.size)
    check.apart_in_recv(counts, displs)
    moved = (sum(counts) - s.size) * s.itemsize
    return Asked(s.dtype, s.size, s.nbytes * (t.size - 1), moved, (counts, displs))


def _check_all_to_all(t: Transport, send: Array, recv: Array) -> Asked:
    s, r = _pair(t, send, recv)
    check.need(r.size == s.size, "all_to_all", "recv holds as many elements as send", s.size, r.size)
    check.need(
        s.size % t.size == 0, "all_to_all",
        f"elements divide by size {t.size} (else use all_to_all_v)", f"a multiple of {t.size}", s.size,
    )  # fmt: skip
    moved = s.nbytes - s.nbytes // t.size
    return Asked(s.dtype, s.size, moved, moved)


def _check_all_to_all_v(
    t: Transport, send: Array, recv: Array, send_counts: Sequence[int], send_displs: Sequence[int],
    recv_counts: Sequence[int], recv_displs: Sequence[int],
) -> Asked:  # fmt: skip
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    check.same_dtype(s, r)
    sc, sd = check.spans("send", t.size, s, send_counts, send_displs)
    rc, rd = check.spans("recv", t.size, r, recv_counts, recv_displs)
    rule = "a rank sends itself what it receives from itself"
    check.need(sc[t.rank] == rc[t.rank], "all_to_all_v", rule, sc[t.rank], rc[t.rank])
    check.apart_in_recv(rc, rd)
    own = sc[t.rank]
    sent, received = (sum(sc) - own) * s.itemsize, (sum(rc) - own) * r.itemsize
    return Asked(s.dtype, s.size, sent, received, (sc, sd, rc, rd))


def _check_broadcast(t: Transport, send: Array | None, recv: Array | None, root: int) -> Asked:
    is_rank(t, root)
    mine = t.rank == root
    b = t.buffers.flat(send if mine else recv, "buf", writes=not mine)
    sent, received = (b.nbytes * (t.size - 1), 0) if mine else (0, b.nbytes)
    return Asked(b.dtype, b.size, sent, received)


def _check_gather(t: Transport, send: Array, recv: Array | None, root: int) -> Asked:
    s = t.buffers.flat(send, "send")
    is_rank(t, root)
    r = _at_root(t, recv, "recv", root, s, s.size * t.size)
    moved = (s.nbytes, 0) if r is None else (0, s.nbytes * (t.size - 1))
    return Asked(s.dtype, s.size, *moved)


def _check_scatter(t: Transport, send: Array | None, recv: Array, root: int) -> Asked:
    r = t.buffers.flat(recv, "recv", writes=True)
    is_rank(t, root)
    s = _at_root(t, send, "send", root, r, r.size * t.size)
    moved = (0, r.nbytes) if s is None else (r.nbytes * (t.size - 1), 0)
    return Asked(r.dtype, r.size, *moved)


def _check_all_reduce(t: Transport, send: Array, recv: Array | None, op: str, order: str) -> Asked:
    s, r = _pair(t, send, recv)
    check.reducible(s, op, order)
    check.need(r.size == s.size, "all_reduce", "recv holds as many elements as send", s.size, r.size)
    moved = _reduced_bytes(t, s)
    return Asked(s.dtype, s.size, moved, moved)


def _check_reduce_scatter(t: Transport, send: Array, recv: Array, op: str, order: str) -> Asked:
    s, r = _pair(t, send, recv)
    check.reducible(s, op, order)
    whole = r.size * t.size
    check.need(s.size == whole, "reduce_scatter", "send holds size x recv elements", whole, s.size)
    moved = r.nbytes * (t.size - 1)
    return Asked(s.dtype, r.size, moved, moved)


def _check_reduce(t: Transport, send: Array, recv: Array | None, op: str, root: int, order: str) -> Asked:
    s = t.buffers.flat(send, "send")
    is_rank(t, root)
    check.reducible(s, op, order)
    r = _at_root(t, recv, "recv", root, s, s.size)
    own = cut(t, s.size)[0][t.rank]
    out, back = (s.size - own) * s.itemsize, own * s.itemsize
    sent = out if r is not None else out + back
    received = back * (t.size - 1) + (out if r is not None else 0)
    return Asked(s.dtype, s.size, sent, received)


def _is_peer(t: Transport, peer: int, name: str) -> None:
    """Raise CommError unless this is another rank."""
    if type(peer) is not int or not 0 <= peer < t.size or peer == t.rank:
        if t.size == 1:
            raise CommError(
                f"{name} is another rank of the communicator, and this one has a single rank; start more"
            )
        marks = "; there is no MPI.ANY_SOURCE or MPI.PROC_NULL here" * str(peer).startswith("-")
        raise CommError(
            f"{name} is another rank of the communicator, 0 to {t.size - 1} but not {t.rank}, got {peer}{marks}"
        )


def _check_send(t: Transport, send: Array, recv: None, dst: int) -> Asked:
    s = t.buffers.flat(send, "buf")
    _is_peer(t, dst, "dst")
    return Asked(s.dtype, s.size, s.nbytes, 0)


def _check_recv(t: Transport, send: None, recv: Array, src: int) -> Asked:
    r = t.buffers.flat(recv, "buf", writes=True)
    _is_peer(t, src, "src")
    return Asked(r.dtype, r.size, 0, r.nbytes)


def _check_send_recv(t: Transport, send: Array, recv: Array, dst: int, src: int) -> Asked:
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    _is_peer(t, dst, "dst")
    _is_peer(t, src, "src")
    return Asked(s.dtype, s.size, s.nbytes, r.nbytes)


def _check_barrier(t: Transport, send: None, recv: None) -> Asked:
    return Asked(None, 0, 0, 0)


def _reduced_bytes(t: Transport, s: Array) -> int:
    own = cut(t, s.size)[0][t.rank]
    return int((s.size - own) * s.itemsize + own * (t.size - 1) * s.itemsize)


# ---- plans of moves, over a transport's primitives


def _plan_all_gather(t: Transport, call: Call, dtype: Any, elems: int) -> Run:
    return _plan_all_gather_v(t, call, dtype, elems, [elems] * t.size, [elems * i for i in range(t.size)])


def _plan_all_gather_v(
    t: Transport, call: Call, dtype: Any, elems: int, counts: Sequence[int], displs: Sequence[int]
) -> Run:
    def run(send: Array, recv: Array) -> None:
        t.verify(call)
        t.all_gather_v(send.reshape(-1), recv.reshape(-1), counts, displs)

    return run


def _plan_all_to_all(t: Transport, call: Call, dtype: Any, elems: int) -> Run:
    each = elems // t.size
    counts, displs = [each] * t.size, [each * i for i in range(t.size)]

    def run(send: Array, recv: Array) -> None:
        t.verify(call)
        t.all_to_all_v(send.reshape(-1), counts, displs, recv.reshape(-1), counts, displs)

    return run


def _plan_all_to_all_v(t: Transport, call: Call, dtype: Any, elems: int, *spans: Sequence[int]) -> Run:
    sc, sd, rc, rd = spans

    def run(send: Array, recv: Array) -> None:
        t.verify(call)
        verify_counts(t, call, sc, rc)
        t.all_to_all_v(send.reshape(-1), sc, sd, recv.reshape(-1), rc, rd)

    return run


def _plan_broadcast(t: Transport, call: Call, dtype: Any, elems: int, root: int) -> Run:
    def run(send: Array | None, recv: Array | None) -> None:
        t.verify(call)
        buf = recv if send is None else send
        t.broadcast(buf.reshape(-1), root)  # type: ignore[union-attr]

    return run


def _plan_gather(t: Transport, call: Call, dtype: Any, elems: int, root: int) -> Run:
    def run(send: Array, recv: Array | None) -> None:
        t.verify(call)
        t.gather(send.reshape(-1), None if recv is None else recv.reshape(-1), root)

    return run


def _plan_scatter(t: Transport, call: Call, dtype: Any, elems: int, root: int) -> Run:
    def run(send: Array | None, recv: Array) -> None:
        t.verify(call)
        t.scatter(None if send is None else send.reshape(-1), recv.reshape(-1), root)

    return run


def _plan_barrier(t: Transport, call: Call, dtype: Any, elems: int) -> Run:
    def run(send: None, recv: None) -> None:
        t.verify(call)
        t.barrier()

    return run


def _no_plan(t: Transport, call: Call, dtype: Any, elems: int, *peers: int) -> Run:
    """Of messages, which a transport runs by itself, alone or in groups."""
    return t.send


# ---- plans of reductions


def _plan_all_reduce(t: Transport, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
    counts, displs = cut(t, elems)
    small = elems * dtype.itemsize <= _ONE_MESSAGE_BYTES
    size = t.size

    def run(send: Array, recv: Array) -> None:
        t.verify(call)
        s, r = send.reshape(-1), recv.reshape(-1)
        if order == "fast" and _native(t, t.native_all_reduce, s, r, op):
            return
        if small:
            whole = t.buffers.xp.empty((size, elems), dtype)
            t.all_gather_v(s, whole.reshape(-1), [elems] * size, [elems * i for i in range(size)])
            fold(list(whole), r, op, order)
            return
        own = r[displs[t.rank] : displs[t.rank] + counts[t.rank]]
        fold(t.terms(s, counts, displs), own, op, order)
        t.all_gather_v(own, r, counts, displs)

    return run


def _plan_reduce_scatter(t: Transport, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
    counts, displs = [elems] * t.size, [elems * i for i in range(t.size)]

    def run(send: Array, recv: Array) -> None:
        t.verify(call)
        s, r = send.reshape(-1), recv.reshape(-1)
        if order == "fast" and _native(t, t.native_reduce_scatter, s, r, op):
            return
        fold(t.terms(s, counts, displs), r, op, order)

    return run


def _plan_reduce(t: Transport, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
    counts, displs = cut(t, elems)
    zero = [0] * t.size

    def run(send: Array, recv: Array | None) -> None:
        t.verify(call)
        own = t.buffers.xp.empty(counts[t.rank], dtype)
        fold(t.terms(send.reshape(-1), counts, displs), own, op, order)
        to_root = [own.size if i == root else 0 for i in range(t.size)]
        if recv is None:
            t.all_to_all_v(own, to_root, zero, own[:0], zero, zero)
        else:
            t.all_to_all_v(own, to_root, zero, recv.reshape(-1), counts, displs)

    return run


def _native(
    t: Transport, call: Callable[[Array, Array, str], bool], send: Array, recv: Array, op: str
) -> bool:
    """Try the transport's own reduction; an average is its sum, divided."""
    if op != "avg":
        return call(send, recv, op)
    # The sum of integers might wrap in their own width, which the exchange sums in 64 bits.
    if send.dtype.kind in "iu" or not call(send, recv, "sum"):
        return False
    divide(recv, t.size)
    return True


# ---- the table


def _either(send: Any, recv: Any) -> Any:
    return recv if send is None else send


ALL_GATHER = Collective(
    "all_gather",
    lambda send, recv: f"all_gather {text_of(send)}",
    _check_all_gather,
    _plan_all_gather,
)
ALL_GATHER_V = Collective(
    "all_gather_v",
    lambda send, recv, counts, displs: f"all_gather_v {send.dtype.name} recv_counts={list(counts)}",
    _check_all_gather_v,
    _plan_all_gather_v,
)
ALL_TO_ALL = Collective(
    "all_to_all",
    lambda send, recv: f"all_to_all {text_of(send)}",
    _check_all_to_all,
    _plan_all_to_all,
)
ALL_TO_ALL_V = Collective(
    "all_to_all_v",
    lambda send, recv, *spans: f"all_to_all_v {send.dtype.name}",
    _check_all_to_all_v,
    _plan_all_to_all_v,
)
BROADCAST = Collective(
    "broadcast",
    lambda send, recv, root: f"broadcast {text_of(_either(send, recv))} root={root}",
    _check_broadcast,
    _plan_broadcast,
    arrays=("buf", "buf"),
)
GATHER = Collective(
    "gather",
    lambda send, recv, root: f"gather {text_of(send)} root={root}",
    _check_gather,
    _plan_gather,
)
SCATTER = Collective(
    "scatter",
    lambda send, recv, root: f"scatter {text_of(recv)} root={root}",
    _check_scatter,
    _plan_scatter,
)
ALL_REDUCE = Collective(
    "all_reduce",
    lambda send, recv, op, order: f"all_reduce {text_of(send)} {op} {order}",
    _check_all_reduce,
    _plan_all_reduce,
)
REDUCE_SCATTER = Collective(
    "reduce_scatter",
    lambda send, recv, op, order: f"reduce_scatter {text_of(send)} {op} {order}",
    _check_reduce_scatter,
    _plan_reduce_scatter,
)
REDUCE = Collective(
    "reduce",
    lambda send, recv, op, root, order: f"reduce {text_of(send)} {op} {order} root={root}",
    _check_reduce,
    _plan_reduce,
)
SEND = Collective(
    "send",
    lambda send, recv, dst: f"send {text_of(send)} to rank {dst}",
    _check_send,
    _no_plan,
    arrays=("buf", "buf"),
)
RECV = Collective(
    "recv",
    lambda send, recv, src: f"recv {text_of(recv)} from rank {src}",
    _check_recv,
    _no_plan,
    arrays=("buf", "buf"),
)
SEND_RECV = Collective(
    "send_recv",
    lambda send, recv, dst, src: f"send_recv {text_of(send)} to rank {dst}, {text_of(recv)} from rank {src}",
    _check_send_recv,
    _no_plan,
)
BARRIER = Collective("barrier", lambda send, recv: "barrier", _check_barrier, _plan_barrier)

COLLECTIVES = {
    what.name: what
    for what in (
        ALL_GATHER, ALL_GATHER_V, ALL_TO_ALL, ALL_TO_ALL_V, BROADCAST, GATHER, SCATTER, ALL_REDUCE, REDUCE_SCATTER,
        REDUCE, BARRIER,
    )
}  # fmt: skip
