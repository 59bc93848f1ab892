"""Cases of programs: calls that are wrong, or lie oddly, after right ones were made."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.comm_kit import PROGRAMS, case, others

from lowshard import DeviceMesh, Layout, Sharded, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError, CommError

Rng = np.random.Generator
ELEMS = 20_000
"""Of a part: past what goes through slots in one piece."""


@case(table=PROGRAMS)
def known_scatter(comm: Communicator, rng: Rng) -> None:
    """A root's buffer is measured each time, though the result is as before."""
    recv, root = np.zeros(4, np.float32), comm.rank == 0
    whole = np.arange(4 * comm.size, dtype=np.float32)
    for _ in range(3):
        comm.scatter(whole if root else None, recv)
        assert recv.tolist() == whole[4 * comm.rank : 4 * comm.rank + 4].tolist()
        for wrong in (whole[:2].copy(), None) if root else ():
            with pytest.raises(BufferMismatchError):
                comm.scatter(wrong, recv)


@case(table=PROGRAMS)
def a_byte_before(comm: Communicator, rng: Rng) -> None:
    """What is sent may begin a byte before what is received."""
    both, parts = np.zeros(comm.size * ELEMS + 1, np.uint8), np.arange(comm.size * ELEMS) % 200
    both[:-1] = parts + comm.rank
    comm.all_to_all(both[:-1], both[1:])
    assert (
        both[1:].reshape(comm.size, ELEMS) - np.arange(comm.size)[:, None]
        == np.split(parts, comm.size)[comm.rank]
    ).all()


@case(table=PROGRAMS)
def known_empty(comm: Communicator, rng: Rng) -> None:
    """An empty result is still one."""
    empty = np.empty(0, np.float32)
    for _ in range(2):
        comm.all_reduce(empty, empty.copy())
        comm.all_gather(empty, empty.copy())
        for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter):
            with pytest.raises(BufferMismatchError, match="recv"):
                call(empty, None)


@case(others, table=PROGRAMS)
def known_true(comm: Communicator, rng: Rng) -> None:
    """True is no rank, also where 1 was one."""
    buf = np.zeros(4, np.float32)
    comm.broadcast(buf, 1)
    with pytest.raises(CommError, match="root is a rank"):
        comm.broadcast(buf, True)


@case(table=PROGRAMS)
def closed(comm: Communicator, rng: Rng) -> None:
    """A closed communicator is refused before its memory, which may be another one's by now, is touched."""
    mesh = DeviceMesh((comm.size,), ("x",))
    layouts = [Layout(mesh, (4 * comm.size, 6 * comm.size), "float32", (Sharded(d),)) for d in (0, 1)]
    plan, local = plan_redistribute(*layouts), np.ones(layouts[0].local_shape(comm.rank), np.float32)
    group = comm.split(0)
    assert group is not None
    execute(plan, local, group)
    group.close()
    live = comm.split(0)
    assert live is not None
    for call in (
        lambda: execute(plan, local, group),
        lambda: lc.collective_step(group, "test").__exit__(None, None, None),
        lambda: lc.share_text(group, "text"),
        lambda: group.step("test", "test", lambda: None),
        lambda: group.split(0),
        group.barrier,
    ):
        with pytest.raises(CommError, match="is closed"):
            call()
    found = np.zeros(4, np.float32)
    for _ in range(3):
        live.all_reduce(np.ones(4, np.float32), found)
        assert found.tolist() == [comm.size] * 4
    if comm.size > 1:
        with pytest.raises(CommError, match="not closed in a grouped"), live.grouped():
            live.close()
    live.close()


@case(others, table=PROGRAMS)
def strict_errors(comm: Communicator, rng: Rng) -> None:
    """NumPy's errors and warnings, which the user may have made exceptions, take no rank out of a reduction."""
    values = np.ones(ELEMS, np.float32)
    values[-1] = 3e38
    small = np.full(ELEMS, np.inf if comm.rank else -np.inf, np.float16)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in ("tree", "rank", "fast"):
            found, halves = np.empty_like(values), np.empty_like(small)
            comm.all_reduce(values, found, order=order)
            assert found[-1] == np.inf
            assert found[0] == comm.size
            comm.all_reduce(small, halves, order=order)
            assert np.isnan(halves.astype(np.float32)).all()
            comm.all_reduce(values, found, op="avg", order=order)


@case(table=PROGRAMS)
def overlapping(comm: Communicator, rng: Rng) -> None:
    """What is sent may overlap the result in any way."""
    n, size, me = ELEMS, comm.size, comm.rank
    for _ in range(5):
        for at in (0, 7, n * (size - 1)):
            room = np.zeros(n * size + 7, np.float32)
            room[at : at + n] = me + 1
            comm.all_gather(room[at : at + n], room[: n * size])
            assert (room[: n * size].reshape(size, n) == np.arange(1, size + 1)[:, None]).all(), at
            room[: n * size] = np.repeat(np.arange(size), n) + me
            comm.reduce_scatter(room[: n * size], room[at : at + n])
            assert (room[at : at + n] == size * me + size * (size - 1) // 2).all(), at
            for root in range(size):
                room = np.zeros(n * size + 7, np.float32)
                room[at : at + n] = me + 1
                comm.gather(room[at : at + n], room[: n * size] if me == root else None, root)
                if me == root:
                    assert (room[: n * size].reshape(size, n) == np.arange(1, size + 1)[:, None]).all(), at
                room[: n * size] = np.repeat(np.arange(size), n)
                comm.scatter(room[: n * size] if me == root else None, room[at : at + n], root)
                assert (room[at : at + n] == me).all(), at


@case(table=PROGRAMS)
def amid_an_element(comm: Communicator, rng: Rng) -> None:
    """Buffers may begin at any byte."""
    for dtype in (np.int64, np.float32, np.float16):
        for elems in (5, ELEMS):
            rooms = [np.zeros(elems * comm.size * np.dtype(dtype).itemsize + 1, np.uint8) for _ in range(2)]
            whole, part = (room[1:].view(dtype) for room in rooms)
            part = part[:elems]
            whole[:] = comm.rank + 1
            for order in ("fast", "tree"):
                comm.reduce_scatter(whole, part, order=order)
                assert (part == comm.size * (comm.size + 1) // 2).all()
                comm.all_reduce(whole[:elems], part, order=order)
                assert (part == comm.size * (comm.size + 1) // 2).all()
            part[:] = comm.rank
            comm.all_gather(part, whole)
            assert (whole.reshape(comm.size, elems) == np.arange(comm.size)[:, None]).all()
            if comm.size > 1:
                comm.send_recv(whole[:elems], (comm.rank + 1) % comm.size, part, (comm.rank - 1) % comm.size)
                assert not part.any()


@case(table=PROGRAMS)
def short_integers(comm: Communicator, rng: Rng) -> None:
    """Sums wrap, and NaN stays, at any length and order."""
    for elems in (5, ELEMS):
        for order in ("fast", "tree"):
            for dtype in (np.int8, np.uint8, np.int16, np.uint16):
                most = np.full(elems, np.iinfo(dtype).max, dtype)
                found = np.empty_like(most)
                comm.all_reduce(most, found, order=order)
                bits = found.view(f"u{most.itemsize}").astype(np.int64)
                assert (bits == int(np.iinfo(dtype).max) * comm.size % (1 << 8 * most.itemsize)).all()
            odd = np.full(elems, np.nan if comm.rank == 0 else 1.0, np.float32)
            for op in ("min", "max"):
                least = np.empty_like(odd)
                comm.all_reduce(odd, least, op=op, order=order)
                assert np.isnan(least).all(), (op, order)


@case(others, table=PROGRAMS)
def explained(comm: Communicator, rng: Rng) -> None:
    """Each pair of ranks, once, on every rank."""
    text = comm.explain()
    assert text.startswith(f"{comm.size} ranks, transport {comm.transport}")
    assert "0-1" in text
    assert ", since " in text
