"""One NCCL communicator and its life: calls, errors, waits with a deadline, the end.

The rules it keeps: no abort while another thread is inside a call; an abort before anything else once a wait
has failed, for a destroy could wait for ever; nothing after either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import numpy as np

from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import InThread, is_done, last_error, wait_for
from lowshard.comm.wait_guard import Watching
from lowshard.errors import CommError, LowshardError, PeerFailed, TimedOut

T = TypeVar("T")

UINT8 = 1  # ncclUint8
SUM = 0  # ncclSum
_INVALID_ARGUMENT = 4  # the one ncclResult_t error that leaves a communicator usable
_REMOTE_ERROR, _IN_PROGRESS, _TIMEOUT = 6, 7, 8
_ABORT_LOCK_S = 1.0
_EXPLAIN_S = 5.0  # for the others' waits to end too, which began at other times
_NOT_OURS = "the NCCL communicator is its maker's: abort it there, or its kernels keep the GPU busy"


class NCCLHandle:
    """What stands between a communicator of ours and one of NCCL's."""

    def __init__(
        self, raw: Any, binding: Binding, *, owned: bool, timeout_s: float, watch: Watching | None,
        explain: Callable[[], LowshardError | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wrap an NCCL communicator."""
        self.raw, self._explain = raw, explain
        self.timeout_s, self.watch = timeout_s, watch
        self.failed = False
        """Whether something went wrong after which only an abort may follow."""
        self._binding, self._owned = binding, owned
        self._state: Literal["open", "ended", "aborted"] = "open"
        self._calling = threading.RLock()
        self.rank, self.size = int(self.call(self.raw.rank_id)), int(self.call(self.raw.size))
        self.device = int(self.call(self.raw.device_id))

    # ---- calls

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of the binding returns."""
        with self._calling:
            self._check_state()
            try:
                return function(*args)
            except KeyError as error:
                # CuPy's table of names ends at 6: results 7 (in progress) and 8 (timeout) trip over it.
                raise self._failure(function, int(error.args[0]), error) from error
            except self._binding.nccl.NcclError as error:
                raise self._failure(function, int(error.status), error) from error

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start everything inside at once."""
        nccl = self._binding.nccl
        with self._calling:
            self.call(nccl.groupStart)
            try:
                yield
            except BaseException:
                # The group must end, or later calls would join it. It complains again of what is raised here.
                with suppress(nccl.NcclError, KeyError):
                    nccl.groupEnd()
                raise
            self.call(nccl.groupEnd)

    def _check_state(self) -> None:
        if self._state == "aborted":
            raise CommError("this NCCL communicator was aborted after an error; make a new one")

    def _failure(self, function: Any, status: int, error: Exception) -> CommError:
        """Return what to raise for an error of NCCL, having told the other ranks of one that ends the communicator."""
        failure = self._named(getattr(function, "__name__", "a call"), status, error)
        if status != _INVALID_ARGUMENT:
            self.failed = True
            # What shows late is told by who knows which call it belongs to.
            if self.watch is not None and function != self.raw.check_async_error:
                self.watch.tell("failed", str(failure))
        return failure

    def _named(self, name: str, status: int, error: Exception) -> CommError:
        if status == _IN_PROGRESS:
            return CommError(
                f"NCCL left {name} unfinished (result {status}); lowshard needs blocking communicators: unset "
                "NCCL_COMM_BLOCKING"
            )
        said = last_error()
        more = f"; NCCL's last message: {said}" if said else ""
        if status == _TIMEOUT:
            return TimedOut(f"NCCL's own time-out in {name} (result {status}){more}")
        if status == _REMOTE_ERROR:
            return PeerFailed(f"NCCL lost another rank in {name}: {error}{more}")
        return CommError(f"NCCL failed in {name}: {error}{more}")

    # ---- waits

    def ask(self) -> None:
        """Raise what the failure channel or NCCL knows to have gone wrong. Does not block."""
        if self.watch is not None and self.watch.flag[0]:
            self.failed = True
            raise self.watch.error("NCCL's work on the GPU")
        self._check_state()
        # A thread that holds the lock is inside NCCL, and will be told by its own call.
        if self._state == "open" and self._calling.acquire(blocking=False):
            try:
                self.call(self.raw.check_async_error)
            finally:
                self._calling.release()

    def look(self, stream: Any, latest: str) -> None:
        """Raise what has gone wrong in the calls so far, having told the other ranks and given up. Does not block."""
        self._check_state()
        try:
            self.ask()
            self._binding.check(stream)
        except CommError as error:
            text = f"{latest}, or a call before it: {error}"
            if self.watch is not None:
                self.watch.tell("failed", text)
            left = self.give_up()
            raise type(error)(f"{text}; {left}" if left else text).about(error.ranks) from error.__cause__

    def has_ended(self, event: Any, what: str) -> bool:
        """Say whether the work before an event is done; does not wait. What it raises: see `look`."""
        return is_done(event, self.watch, self, what)

    def explain(self) -> LowshardError | None:
        """Return why a wait was in vain, as far as the ranks find out together in a moment."""
        thread = InThread(self._explain, "lowshard comparison of calls")
        end_s = time.monotonic() + min(self.timeout_s, _EXPLAIN_S)
        while not thread.done:
            if time.monotonic() > end_s or (self.watch is not None and self.watch.flag[0]):
                return None
            time.sleep(1e-3)
        try:
            return thread.result()
        except CommError:
            return None

    def give_up(self) -> str:
        """Abort the NCCL communicator, so that its kernels leave the device; return what hindered it, or ""."""
        self.failed = True
        if self._state != "open":
            return ""
        if not self._owned:
            return _NOT_OURS
        if not self._calling.acquire(timeout=_ABORT_LOCK_S):
            return "it was not aborted, for another thread is inside an NCCL call"
        try:
            self._state = "aborted"
            with suppress(self._binding.nccl.NcclError, KeyError):
                self.raw.abort()
        finally:
            self._calling.release()
        return ""

    def wait_on_host(self, awaited: Any, timeout_s: float, what: str) -> None:
        """Return once an event, or what else has `.done`, is done.

        A time below the communicator's own is no deadline: when it is over, what is waited for goes on.
        """
        deadline = time.monotonic() + min(timeout_s, self.timeout_s)
        wait_for(awaited, deadline, self.watch, self, what, final=timeout_s >= self.timeout_s)
        self._check_state()  # an abort ends the work too, and leaves anything in the buffers

    def blocking(self, call: Callable[[], T], what: str) -> T:
        """Make a call that may block for ever, with the deadline."""

        def on_device() -> T:
            self._binding.select(self.device)  # a new thread begins on device 0
            return call()

        thread = InThread(on_device)
        self.wait_on_host(thread, self.timeout_s, what)
        return thread.result()

    # ---- connections

    def connect(self) -> None:
        """Connect this rank to all others now.

        Collective: all ranks of the communicator call this.

        NCCL connects two ranks inside the first call that needs it: that call blocks the host until the other rank has
        come, where no deadline can be kept and no abort is safe. So each rank exchanges a byte with every other (send
        and recv, and what is made of them), and takes part in an all_reduce and an all_gather of few bytes, all in a
        thread that is waited for with the deadline. What is not connected by this: algorithms that NCCL takes for
        larger buffers only (rings beside trees, NVLS), unless NCCL_RUNTIME_CONNECT=0 makes NCCL connect all of them
        when the communicator is made, as `lowshard.comm.nccl_over_mpi` sets.
        """
        if self.size == 1:
            return
        what = f"NCCL connecting rank {self.rank} to {self.size - 1} others"
        # The memory is kept until the device is done with it.
        memory, done = self.blocking(self._exchange_bytes, what)
        try:
            self.wait_on_host(done, self.timeout_s, what)
        finally:
            del memory

    def _exchange_bytes(self) -> tuple[Any, Any]:
        binding, size = self._binding, self.size
        stream, peers = binding.new_stream(), [peer for peer in range(size) if peer != self.rank]
        with stream:
            memory = binding.xp.zeros(3 * size, np.uint8)
            sent, received, gathered = (memory[i * size : (i + 1) * size] for i in range(3))
            with self.group():
                for peer in peers:
                    source, target = (binding.pointer(part[peer : peer + 1]) for part in (sent, received))
                    self.call(self.raw.send, source, 1, UINT8, peer, stream.ptr)
                    self.call(self.raw.recv, target, 1, UINT8, peer, stream.ptr)
            at = binding.pointer(sent)
            self.call(self.raw.allReduce, at, at, size, UINT8, SUM, stream.ptr)
            own = binding.pointer(sent[:1])
            self.call(self.raw.allGather, own, binding.pointer(gathered), 1, UINT8, stream.ptr)
            done = binding.new_event()
            done.record(stream)
        return (stream, memory), done

    # ---- the end

    def end(self) -> None:
        """Give NCCL's resources back: destroy if all is well, else abort. Leaves alone what is not ours."""
        if not self._owned or self._state != "open":
            return
        if not self.failed:
            with suppress(CommError):  # ask sets failed, which is all that matters here
                self.ask()
        if self.failed:  # destroy can wait for ever for a peer that is gone
            self.give_up()
            return
        self._state = "ended"  # no abort beside it
        try:
            self.blocking(self.raw.destroy, "close")
        except KeyError as error:
            raise self._failure(self.raw.destroy, int(error.args[0]), error) from error
        except self._binding.nccl.NcclError as error:
            raise self._failure(self.raw.destroy, int(error.status), error) from error
