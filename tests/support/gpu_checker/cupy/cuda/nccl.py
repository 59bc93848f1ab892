"""`cupy.cuda.nccl`: communicators of threads and processes that check NCCL's rules.

A call is an operation on its stream. Ranks meet in a folder of small files, so a call never blocks the host: the stream
waits for what NCCL's kernel would wait for. Where ranks ask for different things the stream is stuck, as NCCL's kernel
may be, until the communicator is aborted; it is reported once the host waits for it without an end.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import pickle
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial, partialmethod, reduce
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupy import cuda
from cupy._memory import Access, block_of, serials
from cupy.checker import OFF, Misuse, locked, need, wait_until, where

available = True
_CODES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16)
_TYPES = [np.dtype(code) for code in _CODES]  # by the numbers of ncclDataType_t
_OPS = (np.add, np.multiply, np.maximum, np.minimum, np.add)
_AVERAGE = 4
_RULES = {
    "allReduce": (False, False, 0, "op"),
    "reduceScatter": (True, False, -1, "op"),
    "allGather": (False, True, 1, ""),
    "broadcast": (False, False, 0, "root"),
}
"""Whether a call reads and writes a part for each rank; of which sign what is read in place lies ahead of what is
written, by a part for each rank before; its argument beside the count and type."""
_ROOT = Path(f"/dev/shm/lowshard-gpu-checker-{os.getuid()}")


class NcclError(RuntimeError):
    status = property(lambda self: self.args[0])


get_version = partial(int, 23203)
get_unique_id = partial(secrets.token_bytes, 128)


class _Call:
    """A call of one rank: gives its bytes to the others, awaits theirs, and writes the result of all.

    `head` is what the others have to ask for too, `ends` the names and ranks of those that take part, of which this is
    `end`: they count their calls of a channel. A graph makes the same call again.
    """

    def __init__(
        self, comm: NcclCommunicator, name: str, stream: int, touched: list[Access], head: list[Any],
        channel: str, ends: dict[str, int], end: str, result: Callable[[list[bytes]], bytes],
    ) -> None:  # fmt: skip
        self.comm, self.name, self.stream, self.touched, self.head = comm, name, stream, touched, head
        self.channel, self.ends, self.end, self.result = channel, ends, end, result

    def give(self) -> None:
        number = next(self.comm.numbers[self.channel, self.end])
        self.names, self.given = {end: f"{self.channel} {number} of {end}" for end in self.ends}, list[Any]()
        sent = [ctypes.string_at(one.low, one.high - one.low) for one in self.touched if not one.writes]
        self.comm.post(self.names[self.end], self.head, b"".join(sent))

    def is_missing(self) -> str | None:
        """Return None where the others have given theirs, else "", or what keeps them from it."""
        comm, mine = self.comm, self.names[self.end]
        if not self.given:
            left = {rank for rank in self.ends.values() if comm.has(f"bye.{rank}")}
            missing = {self.ends[end] for end, name in self.names.items() if not comm.has(name)}
            if missing:
                gone = min(left & missing, default=None)
                return "" if gone is None else f"rank {gone} has left before {mine}, {self.head}"
            self.given = [comm.find(name) for name in self.names.values()]
        for (head, _), rank in zip(self.given, self.ends.values(), strict=True):
            if head != self.head:
                return f"{mine} is {self.head} on rank {comm.rank}, and {head} on rank {rank}"
        return None

    def run(self) -> None:
        if made := self.result([body for _, body in self.given]):
            ctypes.memmove(self.touched[0].low, made, len(made))


def groupStart() -> None:
    cuda.of_thread.groups += 1


def groupEnd() -> None:
    need(cuda.of_thread.groups > 0, "groupEnd without groupStart")
    cuda.of_thread.groups -= 1
    if cuda.of_thread.groups:
        return
    calls, cuda.of_thread.calls = cuda.of_thread.calls, []
    for comm in dict.fromkeys(call.comm for call in calls):
        comm.need_life("the end of a group")
        some = [call for call in calls if call.comm is comm]
        is_one = len({call.stream for call in some}) == 1
        need(is_one, "calls of a communicator in one group are on several streams")
        for one, two in combinations(some, 2):
            is_apart = not any(a.conflicts_with(b) for a, b in product(one.touched, two.touched))
            need(is_apart, f"{one.name} and {two.name} of one group use the same memory, one writes it")
        comm.queue(some)


class NcclCommunicator:
    """A rank's end of a communicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        need(len(commId) == 128 and 0 <= rank < ndev, f"rank {rank} of {ndev}")
        if ndev > cuda.runtime.getDeviceCount() and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NcclError(5)  # invalid usage
        self.rank, self.ranks, self.ended, self.comm = rank, ndev, "", next(serials)
        self.clock, self.numbers = cuda.Clock(), defaultdict[Any, Any](partial(count, 1))
        self.given = defaultdict[Any, list[str]](list)  # and not taken away
        self._folder = _ROOT / hashlib.sha256(commId).hexdigest()[:24]
        self._folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self._at_exit)
        self._meet("hello", None)

    def need_life(self, name: str) -> None:
        need(not self.ended, f"{name} on a communicator after {self.ended}")

    def _asked(self, name: str) -> int:
        self.need_life(name)
        return {"rank_id": self.rank, "size": self.ranks}.get(name, 0)

    def _access(self, name: str, at: int, elems: int, datatype: int, writes: bool) -> list[Access]:
        """Return what a call touches of an array, with all that can be said of it checked."""
        self.need_life(name)
        need(all(type(word) is int for word in (at, elems, datatype)), f"{name}: CuPy takes integers")
        need(0 <= datatype < len(_TYPES) and elems >= 0, f"{name}: {elems} elements of type {datatype}")
        item = _TYPES[datatype].itemsize
        need(at % item == 0 or not elems, f"{name}: {at:#x} is not aligned to an element of {item} bytes")
        found = [Access(at, at + elems * item, writes)] if elems else []
        for access in found:
            block_of(access, f"NCCL's {name}", where(), next(serials))
        return found

    def _submit(self, name: str, stream: int, *what: Any) -> None:
        cuda.stream_at(stream)
        groupStart()
        cuda.of_thread.calls.append(_Call(self, name, stream, *what))
        groupEnd()

    def queue(self, calls: list[_Call]) -> None:
        """Put calls on their stream as one operation."""
        is_given: list[bool] = []

        def ready() -> str | None:
            if self.ended:
                return None
            for call in () if is_given else calls:
                call.give()
            is_given[:] = [True]
            found = [call.is_missing() for call in calls]  # each says what it is stuck in
            return max((why for why in found if why is not None), default=None)

        def run() -> list[Access]:
            is_given.clear()
            if self.ended or OFF:
                return []
            for call in calls:
                call.run()
            # Who has given in a channel is done with what was given there before.
            for call in calls:
                self._take_away(*self.given.pop((call.channel, call.end), []))
            for call in calls:
                self.given[call.channel, call.end].append(call.names[call.end])
            return [access for call in calls for access in call.touched]

        with locked():
            # NCCL orders the kernels of a communicator among themselves, whichever streams they are on.
            at = cuda.stream_at(calls[0].stream)
            at.clock = cuda.merged(at.clock, {} if at.capture else self.clock)
            names = "+".join(sorted({call.name for call in calls}))
            cuda.put(f"NCCL's {names}", run, "collectives", at.ptr, ready)
            self.clock = cuda.merged(self.clock, {} if at.capture else at.clock)

    def _collective(self, name: str, source: int, target: int, elems: int, datatype: int, *rest: int) -> None:
        """Make a call of all ranks: its last arguments are an op or a root, if it has one, and the stream."""
        (reads, writes, ahead, word), (*words, stream) = _RULES[name], rest
        value = words[0] if word else -1
        need(-1 <= value < {"op": len(_OPS), "root": self.ranks, "": 0}[word], f"{name}: {word} {value}")
        touched = self._access(name, target, elems * (self.ranks if writes else 1), datatype, True)
        kind, part = _TYPES[datatype], elems * _TYPES[datatype].itemsize
        if word != "root" or value == self.rank:
            touched += self._access(name, source, elems * (self.ranks if reads else 1), datatype, False)
            is_apart = len(touched) < 2 or not touched[0].conflicts_with(touched[1])
            is_right = is_apart or source == target + ahead * self.rank * part
            need(is_right, f"{name}: its arrays overlap, and it is not in place as NCCL has it")

        def result(given: list[bytes]) -> bytes:
            if word != "op":
                return given[value] if word else b"".join(given)
            first = part * self.rank if reads else 0
            return _reduced([one[first : first + part] for one in given], kind, value)

        head, ends = [name, elems, kind.name, *words], {str(rank): rank for rank in range(self.ranks)}
        self._submit(name, stream, touched, head, "call", ends, str(self.rank), result)

    def _message(self, name: str, at: int, elems: int, datatype: int, peer: int, stream: int) -> None:
        need(0 <= peer < self.ranks, f"{name}: rank {peer} of {self.ranks}")
        touched = self._access(name, at, elems, datatype, name == "recv")
        sender, receiver = (self.rank, peer) if name == "send" else (peer, self.rank)
        head, channel = ["message", elems, _TYPES[datatype].name], f"message {sender} to {receiver}"
        result = b"".join if name == "recv" else lambda given: b""
        self._submit(name, stream, touched, head, channel, {"send": sender, "recv": receiver}, name, result)

    def commSplit(self, color: int, key: int) -> NcclCommunicator | None:
        """Return a communicator of the ranks that give the same colour, which is -1 for none."""
        self.need_life("commSplit")
        need(not cuda.of_thread.groups, "commSplit within a group")
        is_idle = cuda.is_known(self.clock)
        need(is_idle, "commSplit while work of the communicator may be under way: it may hang")
        name = f"split {next(self.numbers['split'])}"
        asked = self._meet(name, [color, key])
        members = sorted((other[1], rank) for rank, other in enumerate(asked) if other[0] == color)
        unique = hashlib.sha512(f"{self._folder} {name} {color}".encode()).digest() * 2
        return None if color < 0 else NcclCommunicator(len(members), unique, members.index((key, self.rank)))

    def _at_exit(self) -> None:
        if not self.ended:
            cuda.advance()
            with suppress(Misuse):  # which is reported
                cuda.stuck()
            self._leave("the end")

    def destroy(self) -> None:
        cuda.host_waits(self.clock, "ncclCommDestroy")
        self._leave("destroy")
        wait_until(lambda: not self._folder.exists() or self._all_have("bye"), "ncclCommDestroy")

    def abort(self) -> None:
        self._leave("abort")
        cuda.advance()

    def _leave(self, how: str) -> None:
        self.need_life(how)
        self.ended = how
        self.post(f"bye.{self.rank}", None)
        if self._all_have("bye"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def post(self, name: str, head: Any, body: bytes = b"") -> None:
        made = self._folder / f".{name}"
        with suppress(FileNotFoundError):  # all ranks have left
            made.write_bytes(pickle.dumps((head, body)))
            made.rename(self._folder / name)

    def find(self, name: str) -> Any:
        return pickle.loads((self._folder / name).read_bytes())

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _all_have(self, name: str) -> bool:
        return all(self.has(f"{name}.{rank}") for rank in range(self.ranks))

    def _meet(self, name: str, mine: Any) -> list[Any]:
        self.post(f"{name}.{self.rank}", mine)
        wait_until(lambda: self._all_have(name), f"{name} of rank {self.rank} of {self.ranks}")
        return [self.find(f"{name}.{rank}")[0] for rank in range(self.ranks)]

    def _take_away(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    allReduce, reduceScatter, allGather, broadcast = map(partial(partialmethod, _collective), _RULES)
    send, recv = map(partial(partialmethod, _message), ("send", "recv"))
    rank_id, size = map(partial(partialmethod, _asked), ("rank_id", "size"))
    device_id, check_async_error = map(partial(partialmethod, _asked), ("device_id", "check_async_error"))


def _reduced(given: list[bytes], kind: np.dtype[Any], op: int) -> bytes:
    arrays = [np.frombuffer(one, kind) for one in reversed(given)]
    with np.errstate(all="ignore"):
        if op == _AVERAGE:
            arrays = [(array * kind.type(1 / len(given))).astype(kind) for array in arrays]
        return reduce(_OPS[op], arrays).astype(kind, copy=False).tobytes()
