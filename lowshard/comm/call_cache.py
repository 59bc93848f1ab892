"""From arguments to calls: what a buffer must be, what a call is named and counted as, and the step into it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from lowshard import dtypes
from lowshard.argument import truth
from lowshard.comm import check
from lowshard.comm.background import Background
from lowshard.comm.call import Call, signature_of, source_line
from lowshard.comm.default_collectives import NO_ARRAY, Algorithms
from lowshard.comm.work import ThreadWork, Work, Worker
from lowshard.errors import BufferMismatchError, CommError, DTypeError, LowshardError
from lowshard.foreign_array import is_foreign, like, view_of

Array = Any  # a NumPy or CuPy array; CuPy ships no types


class Arguments(Algorithms):
    """Checks of what users pass, the store of known calls, and the one way into a call."""

    _worker: Worker | None = None

    def __init__(self, rank: int, size: int, **settings: Any) -> None:
        super().__init__(rank, size, **settings)
        self._lines: dict[tuple[str, int], Worker] = {}
        self._backgrounds: WeakSet[Background] = WeakSet()
        self._beside: Background | None = None

    _batch: list[tuple[Call, Array, int]] | None = None
    _batch_thread: int | None = None  # whose block it is

    # ---- into a call

    def _enter(self, what: str) -> None:
        """Begin a call of this thread, after those that were started."""
        if self._worker is not None:
            self._worker.settle()
        super()._enter(what)

    def _do(self, call: Call, *buffers: Any) -> None:
        """Run a call: in turn after those that were started, numbered, counted, recorded."""
        if self._batch is not None and not (self._worker is not None and self._worker.is_current()):
            self._no_batch(call.name)
        self._enter(call.name)
        self._sequence += 1
        self._activity.enter(call.record, self._sequence)
        try:
            call.run(*buffers)
        finally:
            self._activity.leave()
            self._turn.release()
        self.traffic.count(call)

    def step(
        self, name: str, text: str, run: Callable[..., None], *args: Any, sent_bytes: int = 0, received_bytes: int = 0,
        reached_bytes: int = 0, key: object = None,
    ) -> None:  # fmt: skip
        """Run what a client makes of this communicator's capabilities as one call of it: in turn, recorded, counted.

        Collective: all ranks of the communicator call this.

        Args:
            name: counted under.
            text: what errors and the record of calls say of it; equal on all ranks.
            run: does it, from `args`.
            args: of `run`.
            sent_bytes: of this rank's elements that others get.
            received_bytes: of others' that this rank gets.
            reached_bytes: of these, what comes by memory.
            key: under which the call is kept for the next time; None keeps nothing.
        """
        call = None if key is None else self._calls.get(key)
        if call is None:
            call = self._make(name, text, 0, sent_bytes, received_bytes)
            call.reached_bytes, call.run = reached_bytes, _apply
            if key is not None:
                self._keep(key, call)
        self._do(call, run, *args)

    def carry(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        """Move what all_to_all_v moves, as a part of a `step`: nothing is checked, compared or counted.

        Collective: all ranks of the communicator call this.
        """
        self._all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)

    def _no_batch(self, name: str) -> None:
        """Raise if a grouped() block is open."""
        if self._batch is not None:
            raise CommError(f"only send and recv are allowed in a grouped() block, not {name}; end it first")

    def _in_group(self) -> bool:
        """Say whether a grouped() block of this thread is open."""
        return self._batch is not None and self._batch_thread in (None, threading.get_ident())

    def _message(self, call: Call, buf: Array, peer: int) -> None:
        """Run a send or a recv, or keep it for the end of this thread's group."""
        if self._in_group():
            self.traffic.count(call)
            assert self._batch is not None
            self._batch.append((call, buf, peer))
            return
        self._settle(call.name, peer)
        alone = not self._lines  # else messages that were started run in threads of their own
        if alone:
            self._enter(call.name)
        self._activity.enter(call.record, 0)
        try:
            call.run(buf, peer)
        finally:
            self._activity.leave()
            if alone:
                self._turn.release()
        self.traffic.count(call)

    def _swap(self, call: Call, send: Array, dst: int, recv: Array, src: int) -> None:
        """Run a send and a recv together."""
        self._settle("send", dst)
        self._settle("recv", src)
        self._enter(call.name)
        halves = [Call("send", call.text, 0, run=self._send), Call("recv", call.text, 0, run=self._recv)]
        self._activity.enter(call.record, 0)
        try:
            self._run_batch([(halves[0], send, dst), (halves[1], recv, src)])
        finally:
            self._activity.leave()
            self._turn.release()
        self.traffic.count(call)

    def _settle(self, name: str, peer: int) -> None:
        """Wait for what was started before a message, where threads run it."""
        if self._worker is not None:
            self._worker.settle()
        if self._lines and (name, peer) in self._lines:
            self._lines[name, peer].settle()

    def close(self) -> None:
        """Wait for what was started, and give the transport's resources back. Closing twice is safe.

        Collective: all ranks of the communicator call this. Where a `with` block ends by an exception the
        ranks may not all get here, so what would wait for them is left to the end of the process.

        Raises:
            Exception: what went wrong in the background, in a save or a refit that was started, and was told to nobody.
        """
        if not self._closed and not self._failed:
            for worker in (self._worker, *self._lines.values()):
                if worker is not None:
                    worker.settle()
            untold = [error for b in list(self._backgrounds) if (error := b.settle()) is not None]
            super().close()
            if untold:
                raise untold[0]
        elif all(b.idle for b in list(self._backgrounds)):
            super().close()
        else:
            self._closed = True  # what goes on reads what would be given back

    def _start(self, name: str, call: Callable[[], Any]) -> Work:
        """Give a call to the communicator's thread."""
        self._no_batch(name)
        if self._worker is None:
            self._worker = Worker(f"lowshard {self.transport} rank {self.rank}")
        line = source_line()

        def run() -> Any:
            self._started_at = line
            try:
                return call()
            finally:
                self._started_at = None

        work = ThreadWork(run, f"{name} on rank {self.rank}")
        self._worker.submit(work)
        return work

    def _start_message(self, name: str, buf: Array, peer: int) -> Work:
        """Give a send or a recv to a thread of its own: it waits for one rank only."""
        call = getattr(self, name)
        work = ThreadWork(lambda: call(buf, peer), f"{name} of rank {self.rank}")
        line = self._lines.get((name, peer))
        if line is None:  # those of one pair stay in order
            line = self._lines[name, peer] = Worker(f"lowshard {name} rank {self.rank} {peer}")
        line.submit(work)
        return work

    def _run_batch(self, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Run sends and recvs together; here sends never wait, so they go first."""
        for call, _, peer in batch:
            self._settle(call.name, peer)
        failed: LowshardError | None = None
        for call, buf, peer in sorted(batch, key=lambda item: item[0].name != "send"):
            try:
                call.run(buf, peer)
            except LowshardError as error:  # the others are on their way and must arrive
                failed = failed or error
        if failed is not None:
            raise failed

    def _known(self, key: object, send: Array | None, recv: Array | None) -> Call | None:
        """Return the call for these arguments if it was made before and the buffers are as they must be."""
        try:
            call = self._calls.get(key)
        except TypeError:  # an argument that cannot be hashed, so a wrong one
            return None
        if call is None or self._closed:
            return None
        if recv is None:
            return call if call.recv_elems == 0 and (send is None or self._ready(send)) else None
        if not self._ready(recv, True) or recv.size != call.recv_elems:
            return None
        if send is recv or send is None:
            return call
        return call if recv.dtype == send.dtype and self._ready(send) else None

    def _counts_key(self, send: Any, *spans: Any) -> object:
        """Return what an exchange of these buffers and counts is known by, or None if it is not worth knowing."""
        sc, sd, recv, rc, rd = spans
        try:
            if send.ndim != 1 or recv.ndim != 1:
                return None
            return (
                "all_to_all_v",
                send.dtype,
                send.size,
                recv.size,
                tuple(sc),
                tuple(sd),
                tuple(rc),
                tuple(rd),
            )
        except (AttributeError, TypeError):
            return None

    def _is_shared(self, shared: object, name: str) -> bool:
        """Return whether a result is to be shared, where the argument is not False."""
        try:
            return truth(shared, "shared is True or False", CommError)
        except LowshardError as error:
            self._refuse(error, name + NO_ARRAY)

    def _ready(self, buf: Array, writes: bool = False) -> bool:
        """Say whether a buffer passes as it is; where it does not, `_flat` says what is wrong, if anything is."""
        if type(buf) is not np.ndarray:
            return False
        flags = buf.flags
        return flags.c_contiguous and (flags.writeable or not writes)

    def _make(
        self, name: str, text: str, recv_elems: int, sent_bytes: int, received_bytes: int
    ) -> Call:  # fmt: skip
        return Call(name, text, signature_of(text, self._group_name), recv_elems, sent_bytes, received_bytes)

    def _keep(self, key: object, call: Call) -> Call:
        return self._calls.put(key, call)

    def _pair(self, send: Array, recv: Array | None) -> tuple[Array, Array]:
        if recv is None:
            raise BufferMismatchError("recv is an array for the result, got None; pass one, or shared=True")
        s, r = self._flat(send, "send"), self._flat(recv, "recv", writes=True)
        check.same_dtype(s, r)
        return s, r

    # ---- arguments of each collective, the first time and whenever something is wrong

    def _check_all_gather(self, send: Array, recv: Array | None) -> Call:
        s, r = self._pair(send, recv)
        check.need(
            r.size == s.size * self.size, "all_gather", "recv holds size x send elements", s.size * self.size,
            r.size,
        )  # fmt: skip
        moved = s.nbytes * (self.size - 1)
        call = self._make("all_gather", f"all_gather {text_of(s)}", r.size, moved, moved)
        call.run = self._plan_all_gather(call, s.dtype, s.size)
        return self._keep(("all_gather", key_of(s)), call)

    def _check_all_to_all(self, send: Array, recv: Array) -> Call:
        s, r = self._pair(send, recv)
        check.need(r.size == s.size, "all_to_all", "recv holds as many elements as send", s.size, r.size)
        check.need(
            s.size % self.size == 0, "all_to_all",
            f"elements divide by size {self.size} (else use all_to_all_v)", f"a multiple of {self.size}", s.size,
        )  # fmt: skip
        moved = s.nbytes - s.nbytes // self.size
        call = self._make("all_to_all", f"all_to_all {text_of(s)}", r.size, moved, moved)
        call.run = self._plan_all_to_all(call, s.dtype, s.size)
        return self._keep(("all_to_all", key_of(s)), call)

    def _check_broadcast(self, buf: Array | None, root: int) -> Call:
        self._root(root)
        mine = self.rank == root
        b = self._flat(buf, "buf", writes=not mine)
        sent, received = (b.nbytes * (self.size - 1), 0) if mine else (0, b.nbytes)
        call = self._make(
            "broadcast", f"broadcast {text_of(b)} root={root}", 0 if mine else b.size, sent, received
        )
        call.run = self._plan_broadcast(call, b.dtype, b.size, root)
        return self._keep(("broadcast", key_of(b), root), call)

    def _check_gather(self, send: Array, recv: Array | None, root: int) -> Call:
        s = self._flat(send, "send")
        self._root(root)
        r = self._root_buffer(recv, "recv", root, s, s.size * self.size)
        moved = (s.nbytes, 0) if r is None else (0, s.nbytes * (self.size - 1))
        call = self._make("gather", f"gather {text_of(s)} root={root}", 0 if r is None else r.size, *moved)
        call.run = self._plan_gather(call, s.dtype, s.size, root)
        return self._keep(("gather", key_of(s), root), call)

    def _check_scatter(self, send: Array | None, recv: Array, root: int) -> Call:
        r = self._flat(recv, "recv", writes=True)
        self._root(root)
        s = self._root_buffer(send, "send", root, r, r.size * self.size)
        moved = (0, r.nbytes) if s is None else (r.nbytes * (self.size - 1), 0)
        call = self._make("scatter", f"scatter {text_of(r)} root={root}", r.size, *moved)
        call.run = self._plan_scatter(call, r.dtype, r.size, root)
        return self._keep(("scatter", key_of(r), root), call)

    def _check_all_reduce(self, send: Array, recv: Array | None, op: str, order: str) -> Call:
        s, r = self._pair(send, recv)
        check.reducible(s, op, order)
        check.need(r.size == s.size, "all_reduce", "recv holds as many elements as send", s.size, r.size)
        call = self._make(
            "all_reduce", f"all_reduce {text_of(s)} {op} {order}", r.size, *self._all_reduce_bytes(s)
        )
        call.run = self._plan_all_reduce(call, s.dtype, s.size, op, order)
        return self._keep(("all_reduce", key_of(s), op, order), call)

    def _check_reduce_scatter(self, send: Array, recv: Array, op: str, order: str) -> Call:
        s, r = self._pair(send, recv)
        check.reducible(s, op, order)
        check.need(
            s.size == r.size * self.size, "reduce_scatter", "send holds size x recv elements",
            r.size * self.size, s.size,
        )  # fmt: skip
        moved = r.nbytes * (self.size - 1)
        call = self._make("reduce_scatter", f"reduce_scatter {text_of(s)} {op} {order}", r.size, moved, moved)
        call.run = self._plan_reduce_scatter(call, s.dtype, r.size, op, order)
        return self._keep(("reduce_scatter", key_of(s), op, order), call)

    def _check_reduce(self, send: Array, recv: Array | None, op: str, root: int, order: str) -> Call:
        s = self._flat(send, "send")
        self._root(root)
        check.reducible(s, op, order)
        r = self._root_buffer(recv, "recv", root, s, s.size)
        own = self._cut(s.size)[0][self.rank]
        out, back = (s.size - own) * s.itemsize, own * s.itemsize
        sent = out if r is not None else out + back
        received = back * (self.size - 1) + (out if r is not None else 0)
        text = f"reduce {text_of(s)} {op} {order} root={root}"
        call = self._make("reduce", text, 0 if r is None else r.size, sent, received)
        call.run = self._plan_reduce(call, s.dtype, s.size, op, root, order)
        return self._keep(("reduce", key_of(s), op, root, order), call)

    def _all_reduce_bytes(self, s: Array) -> tuple[int, int]:
        own = self._cut(s.size)[0][self.rank]
        moved = (s.size - own) * s.itemsize + own * (self.size - 1) * s.itemsize
        return moved, moved

    # ---- shared results

    def _shared(
        self, name: str, send: Array | None, recv: Array | None, *, root: int = 0, op: str = "sum",
        order: str = "fast",
    ) -> Array:  # fmt: skip
        """Run a collective whose result the ranks of a node share, and return it read-only."""
        if is_foreign(send):
            try:
                seen = view_of(send, "buf" if name == "broadcast" else "send")
            except LowshardError as error:
                self._refuse(error, name + NO_ARRAY)
            return like(self._shared(name, seen, recv, root=root, op=op, order=order), send)
        text = (
            f"{name} shared root={root}"
            if name == "broadcast"
            else f"{name} shared {text_of(send)} {op} {order}"
        )
        try:
            self._open()
            if recv is not None:
                raise BufferMismatchError("shared=True returns the result: pass no recv beside it")
            if name == "broadcast":
                self._root(root)
            flat = None
            if name != "broadcast" or self.rank == root:
                flat = self._flat(send, "send" if name != "broadcast" else "buf")
            if name == "all_reduce":
                check.reducible(flat, op, order)
        except LowshardError as error:
            self._refuse(error, text)
        sent, received = self._shared_bytes(name, flat)
        signed = self._calls.get(("shared", text))
        if signed is None:
            signed = self._keep(("shared", text), self._make(name, text, 0, 0, 0))
        call = Call(name, text, signed.signature, 0, sent, received)
        made: list[Array] = []

        def run() -> None:
            if name == "all_gather":
                made.append(self._shared_all_gather(call, flat))
            elif name == "all_reduce":
                made.append(self._shared_all_reduce(call, flat, op, order))
            else:
                made.append(self._shared_broadcast(call, send, root))

        call.run = run
        try:
            self._do(call)
        finally:
            call.run = _nothing  # the record of calls keeps this one for a while, but no buffer
        result = made.pop()  # the record of calls keeps this one for a while, but not its result
        if name == "all_gather":
            assert send is not None
            rest = send.shape[1:] if send.ndim else ()
            result = result.reshape((self.size * (send.shape[0] if send.ndim else 1), *rest))
        elif name == "all_reduce":
            assert send is not None
            result = result.reshape(send.shape)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        return result

    def _shared_bytes(self, name: str, flat: Array | None) -> tuple[int, int]:
        if flat is None:
            return 0, 0
        if name == "all_reduce":
            return self._all_reduce_bytes(flat)
        moved = flat.nbytes * (self.size - 1)
        return moved, 0 if name == "broadcast" else moved


def key_of(buf: Any) -> object:
    """Return what a call's buffer is known by."""
    try:
        return buf.dtype, buf.size
    except AttributeError:
        return None


def name_of(buf: Any) -> str:
    """Return a buffer's dtype as text, or what it is instead."""
    dtype = getattr(buf, "dtype", None)
    return str(getattr(dtype, "name", type(buf).__name__))


def text_of(buf: Any) -> str:
    """Return dtype and elements of a buffer as text: float32[1024]; NO_ARRAY where the dtype is none of the table."""
    try:
        dtypes.get(buf.dtype)
        return f"{name_of(buf)}[{buf.size}]"
    except (AttributeError, DTypeError):
        return name_of(buf) + NO_ARRAY


def _nothing() -> None:
    """What a call that is over runs."""


def _apply(run: Callable[..., None], *args: Any) -> None:
    run(*args)
