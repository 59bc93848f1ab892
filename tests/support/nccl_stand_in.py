"""A stand-in for `cupy.cuda.nccl` on machines without a GPU: it really moves bytes, between threads, by address.

It takes what CuPy's binding takes (addresses, counts, dtype and op codes, a stream) and knows nothing of
arrays. Where NCCL would leave a result undefined or hang (ranks differ, buffers overlap, an address that
nobody asked the adapter for, another stream than the current one), it raises `MisuseError`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from support.device_stand_in import DEVICE, DeviceStandIn, StandInStream, need

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.staged import staged_communicator

T = TypeVar("T")

LIMIT_S = 30.0

# ncclDataType_t and ncclRedOp_t, from nccl.h, not from the table under test.
TYPES = {
    0: np.dtype(np.int8), 1: np.dtype(np.uint8), 2: np.dtype(np.int32), 3: np.dtype(np.uint32),
    4: np.dtype(np.int64), 5: np.dtype(np.uint64), 6: np.dtype(np.float16), 7: np.dtype(np.float32),
    8: np.dtype(np.float64), 9: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
OPS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}
AVERAGE = 4  # each operand is scaled before it is added, as NCCL does with floats


class NcclError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int) -> None:
        if status > 6:
            raise KeyError(status)  # CuPy's table of names ends there
        super().__init__(f"NCCL_ERROR_{status}: stand-in")
        self.status = status


class CudaError(RuntimeError):
    """As CuPy's CUDARuntimeError."""


def overlap(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    return a < b + b_bytes and b < a + a_bytes


@dataclass
class Message:
    """One send that waits for its recv."""

    at: int
    count: int
    code: int
    taken: threading.Event = field(default_factory=threading.Event)


class World:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Condition()
        self.posts: dict[int, dict[int, Any]] = {}
        self.mail: dict[tuple[int, int], list[Message]] = {}
        self.children: dict[tuple[int, int], World] = {}
        self.broken = False

    def fail(self) -> None:
        """End all waits; a rank has failed."""
        with self.lock:
            self.broken = True
            self.lock.notify_all()
        for child in list(self.children.values()):
            child.fail()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait, under the lock, for a condition."""
        end = time.monotonic() + LIMIT_S
        while not ready():
            need(not self.broken, "another rank failed")
            need(
                self.lock.wait(max(0.0, end - time.monotonic())) or ready(), f"{what}: a real NCCL would hang"
            )


class StandInNccl:
    """The module: shared by all ranks, with a group and a current stream for each thread."""

    NcclError = NcclError
    available = True

    def __init__(self) -> None:
        self.local = threading.local()
        self.groups = 0

    @property
    def queue(self) -> list[tuple[StandInCommunicator, str, tuple[Any, ...]]] | None:
        """What the open group of this thread has collected; None outside of a group."""
        return getattr(self.local, "queue", None)

    def groupStart(self) -> None:
        need(self.queue is None, "groups are not nested")
        self.local.queue = []
        self.groups += 1

    def groupEnd(self) -> None:
        queue = self.queue
        need(queue is not None, "groupEnd without groupStart")
        self.local.queue = None
        if queue:
            queue[0][0].run([(name, args) for _, name, args in queue])


class Host(DeviceStandIn):
    """One rank's array module, as far as the adapter sees it: NumPy, with a record of what it asked for."""

    def __init__(self, device: int = DEVICE) -> None:
        super().__init__(device)
        self.nccl = StandInNccl()

    def binding(self, with_nccl: bool = True) -> Binding:
        """Return what the communicator takes in place of CuPy's."""
        return Binding(
            nccl=self.nccl if with_nccl else None,
            xp=np,
            stream=self.stream_of,
            on_stream=self.on_stream,
            new_stream=self.new_stream,
            new_event=self.new_event,
            check=self.check,
            capturing=self.capturing,
            keep_memory=self.keep_memory,
            cuda_error=CudaError,
            pointer=self.pointer,
            device=lambda array: self.device_of(array),
            current=lambda: self.current,
            select=self.select,
            synchronize=self.synchronize,
            lock=self.lock_memory,
            fetch=self.fetch,
            store=self.store,
            copy=self.copy,
        )


class StandInCommunicator:
    """The communicator's end of one rank, with the methods of CuPy's."""

    def __init__(self, world: World, rank: int, host: Host) -> None:
        self._world, self._rank, self._host = world, rank, host
        self._round = 0
        self.calls: list[tuple[Any, ...]] = []
        """(name, arguments...) of every call, in order."""
        self.ended = ""
        self.next_error: BaseException | None = None
        """Raised by the next call."""
        self.error_in = ""
        """The name of that call; by default, any."""

    def _take(self, name: str, *args: Any) -> None:
        need(not self.ended, f"{name} after {self.ended}")
        self.calls.append((name, *args))
        self._raise_next(name)

    def _raise_next(self, name: str) -> None:
        if self.next_error is not None and self.error_in in ("", name):
            error, self.next_error = self.next_error, None
            raise error

    def _transfer(self, name: str, *args: Any) -> None:
        self._take(name, *args)
        need(args[-1] == self._host.stream.ptr, f"{name} on stream {args[-1]}, not on the current one")
        queue = self._host.nccl.queue
        if queue is None:
            self.run([(name, args)])
        else:
            queue.append((self, name, args))

    # ---- CuPy's methods

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def device_id(self) -> int:
        return self._host.device

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._transfer("allReduce", sendbuf, recvbuf, count, datatype, op, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self._transfer("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._transfer("allGather", sendbuf, recvbuf, count, datatype, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._transfer("broadcast", sendbuff, recvbuff, count, datatype, root, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._transfer("recv", recvbuf, count, datatype, peer, stream)

    def commSplit(self, color: int, key: int, config: object = None) -> StandInCommunicator | None:
        self._take("commSplit", color, key)
        need(self._host.synchronized > 0, "a split while work may be under way")
        asked = self._meet((color, key))
        if color == -1:
            return None
        members = sorted((k, r) for r, (c, k) in asked.items() if c == color)
        with self._world.lock:
            world = self._world.children.setdefault((self._round, color), World(len(members)))
        return StandInCommunicator(world, members.index((key, self._rank)), self._host)

    def check_async_error(self) -> None:
        need(not self.ended, f"check_async_error after {self.ended}")
        self._raise_next("check_async_error")

    def abort(self) -> None:
        need(not self.ended, f"abort after {self.ended}")
        self.ended = "abort"

    def destroy(self) -> None:
        need(not self.ended, f"destroy after {self.ended}")
        self.ended = "destroy"
        self._raise_next("destroy")

    # ---- what a real NCCL does on the device

    def run(self, batch: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Do the calls of one group."""
        writes: list[tuple[int, int]] = []
        reads: list[tuple[int, int]] = []
        for name, args in batch:
            source, target, received, sent = self._spans(name, args)
            in_place = name == "broadcast" and source == target
            writes += [(target, received)] if target is not None else []
            reads += [(source, sent)] if source is not None and not in_place else []
        for i, (at, n_bytes) in enumerate(writes):
            for other, m_bytes in writes[:i]:
                need(not overlap(at, n_bytes, other, m_bytes), "two calls of one group write one place")
            for source, m_bytes in reads if len(batch) > 1 else []:
                need(not overlap(at, n_bytes, source, m_bytes), "a group writes what it still sends")
        own = []
        for name, args in batch:
            if name == "send":
                own.append(self._post(*args[:4]))
        for name, args in batch:
            if name == "recv":
                self._fetch(*args[:4])
            elif name != "send":
                self._collective(name, args)
        for message in own:
            with self._world.lock:
                self._world.wait(message.taken.is_set, "a send that nobody receives")
        self._host.used = True

    def _spans(self, name: str, args: tuple[Any, ...]) -> tuple[int | None, int | None, int, int]:
        """Return addresses read and written and their bytes, having checked them."""
        size = self._world.size
        code = args[2] if name in ("send", "recv") else args[3]
        count = args[1] if name in ("send", "recv") else args[2]
        need(code in TYPES, f"no such dtype code: {code}")
        need(count > 0, f"{name} of {count} elements")
        n_bytes = count * TYPES[code].itemsize
        source = args[0] if name != "recv" else None
        target = None if name == "send" else args[0] if name == "recv" else args[1]
        sent = n_bytes * (size if name == "reduceScatter" else 1)
        received = n_bytes * (size if name == "allGather" else 1)
        for at, m_bytes in ((source, sent), (target, received)):
            if at is not None:
                need(self._host.covers(at, m_bytes), f"{name}: {m_bytes} bytes at {at}: no such array")
        if source is not None and target is not None:
            own = self._rank * n_bytes
            allowed = {"allGather": target + own, "reduceScatter": target - own}.get(name, target)
            need(
                source == allowed or not overlap(source, sent, target, received),
                f"{name}: buffers overlap, but not in place",
            )
        return source, target, received, sent

    def _meet(self, mine: Any) -> dict[int, Any]:
        world = self._world
        self._round += 1
        with world.lock:
            posts = world.posts.setdefault(self._round, {})
            posts[self._rank] = mine
            world.lock.notify_all()
            world.wait(lambda: len(posts) == world.size, f"ranks {sorted(posts)} of {world.size} came")
        return posts

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        posts = self._meet((name, args))
        target, count, code = args[1:4]
        for other, (its_name, its_args) in posts.items():
            same = (its_name, its_args[2:-1]) == (name, args[2:-1])
            need(same, f"rank {self._rank} calls {name}{args[2:-1]}, rank {other} {its_name}{its_args[2:-1]}")
        dtype, size = TYPES[code], self._world.size
        n_bytes = count * dtype.itemsize
        if name == "broadcast":
            result = ctypes.string_at(posts[args[4]][1][0], n_bytes)
        elif name == "allGather":
            result = b"".join(ctypes.string_at(posts[r][1][0], n_bytes) for r in range(size))
        else:
            need(dtype.itemsize > 2 or dtype.kind in "iu", f"{name} of {dtype}: NCCL promises no float32 sum")
            start = n_bytes * self._rank if name == "reduceScatter" else 0
            value = None
            # From the last rank on: an order that is neither the tree nor the ranks' own.
            for peer in reversed(range(size)):
                raw = ctypes.string_at(posts[peer][1][0] + start, n_bytes)
                term = np.frombuffer(raw, dtype)
                if args[4] == AVERAGE:
                    need(dtype.kind == "f", f"an average of {dtype}: NCCL would truncate it")
                    term = term * dtype.type(1 / size)
                value = term if value is None else OPS[args[4] % AVERAGE](term, value)
            assert value is not None
            result = value.tobytes()
        self._meet("read")
        ctypes.memmove(target, result, len(result))
        self._meet("written")

    def _post(self, at: int, count: int, code: int, peer: int) -> Message:
        message = Message(at, count, code)
        need(0 <= peer < self._world.size, f"send to rank {peer}")
        with self._world.lock:
            self._world.mail.setdefault((self._rank, peer), []).append(message)
            self._world.lock.notify_all()
        return message

    def _fetch(self, at: int, count: int, code: int, peer: int) -> None:
        world = self._world
        with world.lock:
            box = world.mail.setdefault((peer, self._rank), [])
            world.wait(lambda: bool(box), f"a recv from rank {peer} that sends nothing")
            message = box.pop(0)
        need(
            (message.count, message.code) == (count, code),
            f"rank {peer} sends {message.count} of code {message.code}, received are {count} of {code}",
        )
        ctypes.memmove(at, message.at, count * TYPES[code].itemsize)
        with world.lock:
            message.taken.set()
            world.lock.notify_all()


class Stuck(StandInCommunicator):
    """A communicator whose work is never done, as where ranks have called different things, until it is aborted."""

    def run(self, batch: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._host.used = True


class StuckHost(Host):
    """A device whose streams are done only once the communicator was aborted."""

    handle: Stuck

    def new_stream(self) -> StandInStream:
        stream = super().new_stream()
        stream.asked = lambda up_to: self.handle.ended == "abort"  # type: ignore[method-assign]
        return stream


def stuck_communicator(
    world: World,
    beside: Communicator,
    timeout_s: float | None = None,
    owned: bool = True,
    late: bool = False,
) -> Communicator:
    """Return a communicator of which no work is ever done, with one of the host beside it."""
    host = StuckHost()
    host.handle = Stuck(world, beside.rank, host)
    return nccl_communicator(
        host.handle,
        beside.rank,
        beside.size,
        beside,
        late=late,
        owned=owned,
        binding=host.binding(),
        timeout_s=timeout_s,
    )


def alone(**options: Any) -> tuple[Communicator, StandInCommunicator, Host]:
    """Return a communicator of one rank, with what stands behind it."""
    host = Host()
    handle = StandInCommunicator(World(1), 0, host)
    comm = nccl_communicator(handle, 0, 1, binding=host.binding(), **options)
    handle.calls.clear()
    return comm, handle, host


def run_stand_in(
    size: int, function: Callable[[Communicator], T], control: bool = True, timeout_s: float = 60.0,
    late: bool = False,
) -> list[T]:  # fmt: skip
    """Run a function in threads on NCCL communicators over the stand-in, with loopback ones beside them for control."""
    world = World(size)

    def work(loopback: Communicator) -> T:
        host = Host()
        handle = StandInCommunicator(world, loopback.rank, host)
        try:
            beside = loopback if control else None
            comm = nccl_communicator(handle, loopback.rank, size, beside, binding=host.binding(), late=late)
            return function(comm)
        except BaseException:
            world.fail()
            raise

    return lc.run_loopback(size, work, timeout_s)


def run_staged(
    size: int, function: Callable[[Communicator], T], slot_bytes: int = 1 << 20, timeout_s: float = 60.0
) -> list[T]:
    """Run a function in threads on staged communicators over loopback ones."""

    def work(loopback: Communicator) -> T:
        host = Host()
        comm = staged_communicator(loopback, host.binding(with_nccl=False), slot_bytes=slot_bytes)
        result = function(comm)
        assert host.synchronized == 0, "the whole device was waited for"
        for stream in host.streams:
            stream.flush()  # a slot that was reused too early is found here at the latest
        return result

    return lc.run_loopback(size, work, timeout_s)
