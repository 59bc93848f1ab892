"""Cases of the communicator contract: everything that moves bytes and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support import mode
from support.comm_kit import Canvas, carried, case, get, put, random_bits, same, told

from lowshard.comm import Communicator

Array = Any


def lengths(comm: Communicator) -> list[int]:
    """Element counts: none, one, fewer than ranks, and some more."""
    return sorted({0, 1, comm.size - 1, 37} | ({5000, 70001} if mode.full() else set()))


def places(comm: Communicator) -> list[tuple[str, bool]]:
    """The ways to pass buffers, as (name, whether this rank works in place)."""
    return [("out of place", False), ("in place", True), ("odd ranks in place", comm.rank % 2 == 1)]


def cut(data: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Cut a flat array into consecutive parts."""
    return np.split(data, np.cumsum(counts)[:-1])


def spread(rng: np.random.Generator, counts: Sequence[int], layout: str) -> tuple[list[int], int]:
    """Return displacements for parts that do not overlap, and the length of a buffer that holds them."""
    order = list(range(len(counts)))
    if layout == "reversed":
        order.reverse()
    elif layout == "shuffled with gaps":
        order = list(rng.permutation(len(counts)))
    displs, end = [0] * len(counts), 0
    for i in order:
        end += int(rng.integers(0, 4)) if layout == "shuffled with gaps" else 0
        displs[i] = end
        end += counts[i]
    return displs, end + (3 if layout == "shuffled with gaps" else 0)


@case()
def all_gather_gives_every_rank_all_parts_in_rank_order(comm: Communicator, rng: np.random.Generator) -> None:
    for row in carried(comm):
        for n in lengths(comm):
            parts = random_bits(rng, (comm.size, n), row)
            for place, mine in places(comm):
                with told(dtype=row, n=n, place=place):
                    recv = Canvas(comm, comm.size * n, row.numpy)
                    send = put(comm, parts[comm.rank])
                    if mine:
                        own = recv.buf[n * comm.rank : n * (comm.rank + 1)]
                        own[...] = send
                        send = own
                    comm.all_gather(send, recv.buf)
                    recv.check(parts.reshape(-1))


@case()
def all_gather_v_puts_parts_of_any_length_where_each_rank_wants_them(
    comm: Communicator, rng: np.random.Generator
) -> None:
    patterns = {
        "uneven": [int(x) for x in rng.integers(0, 9, comm.size)],
        "rank 0 alone": [11] + [0] * (comm.size - 1),
        "last rank alone": [0] * (comm.size - 1) + [11],
        "every second": [(i % 2) * 5 for i in range(comm.size)],
        "nobody": [0] * comm.size,
        "equal": [6] * comm.size,
        "long and short": [1] * (comm.size - 1) + [3000],
    }
    layouts = ["dense", "reversed", "shuffled with gaps"]
    for row in carried(comm):
        for name, counts in patterns.items():
            parts = cut(random_bits(rng, (sum(counts),), row), counts)
            # Each rank has a layout of its own: displacements concern nobody else.
            for shift in range(len(layouts) if name in ("uneven", "equal") else 1):
                layout = layouts[(comm.rank + shift) % len(layouts)]
                mine = np.random.default_rng(int(rng.integers(1 << 30)) + comm.rank)
                displs, length = spread(mine, counts, layout)
                for place, in_place in places(comm):
                    with told(dtype=row, counts=counts, displs=displs, place=place):
                        recv = Canvas(comm, length, row.numpy)
                        send = put(comm, parts[comm.rank])
                        if in_place:
                            own = recv.buf[displs[comm.rank] : displs[comm.rank] + counts[comm.rank]]
                            own[...] = send
                            send = own
                        expected = Canvas.blank(length, row.numpy)
                        for part, displ in zip(parts, displs, strict=True):
                            expected[displ : displ + len(part)] = part
                        comm.all_gather_v(send, recv.buf, counts, displs)
                        recv.check(expected)


@case()
def all_to_all_transposes_parts(comm: Communicator, rng: np.random.Generator) -> None:
    for row in carried(comm):
        for n in lengths(comm):
            sent = random_bits(rng, (comm.size, comm.size, n), row)  # [from, to, element]
            for place, mine in places(comm):
                with told(dtype=row, n=n, place=place):
                    recv = Canvas(comm, comm.size * n, row.numpy)
                    send = put(comm, sent[comm.rank].reshape(-1))
                    if mine:
                        recv.buf[...] = send
                        send = recv.buf
                    comm.all_to_all(send, recv.buf)
                    recv.check(sent[:, comm.rank].reshape(-1))
                    if not mine:
                        same(send, sent[comm.rank].reshape(-1))


@case()
def all_to_all_v_moves_any_counts_between_any_places(comm: Communicator, rng: np.random.Generator) -> None:
    size, rank = comm.size, comm.rank
    patterns = {
        "random": rng.integers(0, 7, (size, size)),
        "sparse": rng.integers(1, 7, (size, size)) * (rng.random((size, size)) < 0.3),
        "own only": np.diag(rng.integers(1, 7, size)),
        "to rank 0": np.eye(1, size, 0, dtype=int).repeat(size, 0) * 5,
        "to the next": np.roll(np.eye(size, dtype=int), 1, 1) * 9,
        "nothing": np.zeros((size, size), int),
        "long and short": np.where(np.arange(size * size).reshape(size, size) % 3, 1, 2500),
    }
    for row in carried(comm):
        for name, matrix in patterns.items():
            counts = matrix.astype(int)
            sent = [cut(random_bits(rng, (int(line.sum()),), row), [int(c) for c in line]) for line in counts]
            mine = np.random.default_rng(int(rng.integers(1 << 30)) + rank)
            to, come = [int(c) for c in counts[rank]], [int(c) for c in counts[:, rank]]
            for layout in ("dense", "shuffled with gaps"):
                with told(dtype=row, pattern=name, layout=layout):
                    send_displs, send_length = spread(mine, to, layout)
                    recv_displs, recv_length = spread(mine, come, layout)
                    content = random_bits(mine, (send_length,), row)
                    for part, displ in zip(sent[rank], send_displs, strict=True):
                        content[displ : displ + len(part)] = part
                    send, recv = put(comm, content), Canvas(comm, recv_length, row.numpy)
                    expected = Canvas.blank(recv_length, row.numpy)
                    for peer, displ in enumerate(recv_displs):
                        expected[displ : displ + come[peer]] = sent[peer][rank]
                    comm.all_to_all_v(send, to, send_displs, recv.buf, come, recv_displs)
                    recv.check(expected)
                    same(send, content)


@case()
def all_to_all_v_in_place_sends_what_was_there_before(comm: Communicator, rng: np.random.Generator) -> None:
    size, rank = comm.size, comm.rank
    for row in carried(comm):
        counts = rng.integers(0, 7, (size, size))
        sent = [cut(random_bits(rng, (int(line.sum()),), row), [int(c) for c in line]) for line in counts]
        to, come = [int(c) for c in counts[rank]], [int(c) for c in counts[:, rank]]
        for place, in_place in places(comm):
            with told(dtype=row, place=place):
                send_displs, send_length = spread(rng, to, "dense")
                recv_displs, recv_length = spread(rng, come, "reversed")
                length = max(send_length, recv_length)
                board = Canvas(comm, length, row.numpy)
                content = Canvas.blank(length, row.numpy)
                content[:send_length] = np.concatenate(sent[rank])
                board.buf[...] = put(comm, content)
                recv = board if in_place else Canvas(comm, length, row.numpy)
                expected = content.copy() if in_place else Canvas.blank(length, row.numpy)
                for peer, displ in enumerate(recv_displs):
                    expected[displ : displ + come[peer]] = sent[peer][rank]
                comm.all_to_all_v(board.buf, to, send_displs, recv.buf, come, recv_displs)
                recv.check(expected)


@case()
def all_to_all_v_may_send_one_part_to_everyone(comm: Communicator, rng: np.random.Generator) -> None:
    size = comm.size
    data = random_bits(rng, (size, 10), carried(comm)[1])
    recv = Canvas(comm, 4 * size, data.dtype)
    # All ranks are sent the same four elements; what each rank sends overlaps.
    comm.all_to_all_v(
        put(comm, data[comm.rank]), [4] * size, [3] * size, recv.buf, [4] * size, [4 * i for i in range(size)]
    )
    recv.check(data[:, 3:7].reshape(-1))


@case()
def broadcast_copies_the_roots_buffer(comm: Communicator, rng: np.random.Generator) -> None:
    for i, row in enumerate(carried(comm)):
        for n in lengths(comm):
            for root in range(comm.size) if i == 0 else [i % comm.size]:
                with told(dtype=row, n=n, root=root):
                    data = random_bits(rng, (comm.size, n), row)
                    buf = Canvas(comm, n, row.numpy)
                    buf.buf[...] = put(comm, data[comm.rank])
                    comm.broadcast(buf.buf, root)
                    buf.check(data[root])


@case()
def gather_collects_in_rank_order_at_the_root(comm: Communicator, rng: np.random.Generator) -> None:
    for i, row in enumerate(carried(comm)):
        for n in lengths(comm):
            for root in range(comm.size) if i == 0 else [i % comm.size]:
                parts = random_bits(rng, (comm.size, n), row)
                for in_place in (False, True):
                    with told(dtype=row, n=n, root=root, in_place=in_place):
                        send = put(comm, parts[comm.rank])
                        if comm.rank != root:
                            comm.gather(send, None, root)
                            same(send, parts[comm.rank])
                            continue
                        recv = Canvas(comm, comm.size * n, row.numpy)
                        if in_place:
                            own = recv.buf[n * root : n * (root + 1)]
                            own[...] = send
                            send = own
                        comm.gather(send, recv.buf, root)
                        recv.check(parts.reshape(-1))


@case()
def scatter_hands_out_in_rank_order_from_the_root(comm: Communicator, rng: np.random.Generator) -> None:
    for i, row in enumerate(carried(comm)):
        for n in lengths(comm):
            for root in range(comm.size) if i == 0 else [i % comm.size]:
                parts = random_bits(rng, (comm.size, n), row)
                for in_place in (False, True):
                    with told(dtype=row, n=n, root=root, in_place=in_place):
                        recv = Canvas(comm, n, row.numpy)
                        if comm.rank != root:
                            comm.scatter(None, recv.buf, root)
                            recv.check(parts[comm.rank])
                            continue
                        whole = put(comm, parts.reshape(-1))
                        if in_place:
                            comm.scatter(whole, whole[n * root : n * (root + 1)], root)
                        else:
                            comm.scatter(whole, recv.buf, root)
                            recv.check(parts[root])
                        same(whole, parts.reshape(-1))


@case()
def send_and_recv_pass_a_buffer_around_the_ring(comm: Communicator, rng: np.random.Generator) -> None:
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for row in carried(comm):
        for n in [*lengths(comm), 20000]:
            with told(dtype=row, n=n):
                data = random_bits(rng, (comm.size, n), row)
                send, recv = put(comm, data[comm.rank]), Canvas(comm, n, row.numpy)
                if comm.rank:  # a send may wait for its recv, so rank 0 starts and the others follow
                    comm.recv(recv.buf, before)
                    comm.send(send, after)
                else:
                    comm.send(send, after)
                    comm.recv(recv.buf, before)
                recv.check(data[before])


@case()
def messages_of_one_pair_stay_in_order(comm: Communicator, rng: np.random.Generator) -> None:
    data = random_bits(rng, (comm.size, 12, 5), carried(comm)[0])
    last = comm.size - 1
    if comm.rank == 0:
        for peer in range(1, comm.size):
            for message in data[peer]:
                comm.send(put(comm, message), peer)
    else:
        for message in data[comm.rank]:
            recv = Canvas(comm, 5, data.dtype)
            comm.recv(recv.buf, 0)
            recv.check(message)
    comm.barrier()
    recv = Canvas(comm, 5, data.dtype)
    if last and comm.rank == last:
        comm.send(put(comm, data[0, 0]), 0)
    elif last and comm.rank == 0:
        comm.recv(recv.buf, last)
        recv.check(data[0, 0])


@case()
def shapes_do_not_matter_and_0d_counts_as_one_element(comm: Communicator, rng: np.random.Generator) -> None:
    row = carried(comm)[0]
    parts = random_bits(rng, (comm.size, 2, 3), row)
    recv = put(comm, np.zeros((3, comm.size, 2), row.numpy))
    comm.all_gather(put(comm, parts[comm.rank]), recv)
    same(recv.reshape(-1), parts.reshape(-1))

    scalars = random_bits(rng, (comm.size,), row)
    gathered = put(comm, np.zeros((1, comm.size), row.numpy))
    comm.all_gather(put(comm, scalars[comm.rank].reshape(())), gathered)
    same(gathered.reshape(-1), scalars)
    scalar = put(comm, scalars[comm.rank].reshape(()))
    comm.broadcast(scalar, comm.size - 1)
    same(scalar, scalars[comm.size - 1].reshape(()))
    one = put(comm, np.zeros((), row.numpy))
    comm.scatter(put(comm, scalars) if comm.rank == 0 else None, one)
    same(one, scalars[comm.rank].reshape(()))

    empty = put(comm, np.zeros((0, 4), row.numpy))
    comm.all_gather(empty, put(comm, np.zeros((comm.size, 0), row.numpy)))
    comm.all_to_all(empty, empty)
    comm.broadcast(empty)


@case()
def large_buffers_arrive_whole(comm: Communicator, rng: np.random.Generator) -> None:
    elems = 300_000 if mode.full() else 60_000
    parts = rng.standard_normal((comm.size, elems)).astype(np.float32)
    recv = put(comm, np.zeros((comm.size, elems), np.float32))
    comm.all_gather(put(comm, parts[comm.rank]), recv)
    same(recv, parts)
    each = elems // comm.size
    whole = parts[:, : each * comm.size].reshape(comm.size, comm.size, each)
    send, got = put(comm, whole[comm.rank]), put(comm, np.zeros((comm.size, each), np.float32))
    comm.all_to_all(send, got)
    same(got, whole[:, comm.rank])
    buf = put(comm, parts[comm.rank])
    comm.broadcast(buf, comm.size - 1)
    same(buf, parts[-1])


@case()
def calls_in_a_row_do_not_mix(comm: Communicator, rng: np.random.Generator) -> None:
    """Many small calls of all kinds on buffers that are reused, with ranks that come early or late."""
    late = np.random.default_rng(comm.rank)
    board = put(comm, np.zeros(comm.size * 4, np.int64))
    for step in range(400 if mode.full() else 60):
        if late.random() < 0.1:
            np.linalg.norm(late.standard_normal((60, 60)))
        values = rng.integers(-99, 99, (comm.size, comm.size * 4))
        kind = int(rng.integers(0, 5))
        root = int(rng.integers(comm.size))
        own = values[comm.rank]
        with told(step=step, kind=kind, root=root):
            if kind == 0:
                comm.all_gather(put(comm, own[:4]), board)
                same(board, values[:, :4].reshape(-1))
            elif kind == 1:
                board[...] = put(comm, own)
                comm.all_to_all(board, board)
                same(board.reshape(comm.size, 4), values.reshape(comm.size, comm.size, 4)[:, comm.rank])
            elif kind == 2:
                board[...] = put(comm, own)
                comm.broadcast(board, root)
                same(board, values[root])
            elif kind == 3:
                board[...] = put(comm, own)
                comm.all_reduce(board, board, order="tree")
                same(board, values.sum(0))
            else:
                comm.gather(put(comm, own[:4]), board if comm.rank == root else None, root)
                if comm.rank == root:
                    same(board, values[:, :4].reshape(-1))


@case()
def what_is_sent_may_be_read_only(comm: Communicator, rng: np.random.Generator) -> None:
    data = rng.standard_normal((comm.size, comm.size))
    send = put(comm, data[comm.rank])
    if isinstance(send, np.ndarray):  # CuPy has no read-only arrays
        send.flags.writeable = False
    recv = put(comm, np.zeros(comm.size * comm.size))
    comm.all_gather(send, recv)
    same(recv, data.reshape(-1))
    comm.all_to_all(send, recv[: comm.size])
    same(recv[: comm.size], data[:, comm.rank].copy())
    comm.all_reduce(send, recv[: comm.size], "max")
    same(recv[: comm.size], data.max(0))
    buf = send if comm.rank == 0 else put(comm, np.zeros(comm.size))
    comm.broadcast(buf, 0)
    assert get(buf).tobytes() == data[0].tobytes()
