"""`Publisher`: a job offers versions of its tensors to jobs that come and go.

```
publish(v)    every rank: agree on v -> copy the sources into a snapshot -> agree that all have
              rank 0:     offer v                      <- v is published from here on
subscriber    want -> offer, and the snapshot is kept for it -> copies what it needs -> votes, switches -> done
```

Subscribers fetch; `publish` waits for none of them. `version_server` has what each rank does for them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np

from lowshard.argument import in_words, number, truth
from lowshard.comm import Communicator, collective_step, loopback, share_text
from lowshard.comm.agreement import control_of, share
from lowshard.comm.background import Background
from lowshard.comm.interface import addresses_towards, interface_addresses, is_loopback, network_name
from lowshard.comm.listener import Listener
from lowshard.comm.work import Stream, Work
from lowshard.content_hash import text_digest
from lowshard.errors import CommError, LowshardError, PeerFailed, PlanError, TimedOut
from lowshard.foreign_array import never_change
from lowshard.layout import Layout
from lowshard.reshard.publication_address import (
    Address,
    FolderLock,
    checked_token,
    folder_listener,
    new_token,
    remove_token,
    tcp_listener,
    write_token,
)
from lowshard.reshard.published_tensors import local_arrays, same_again, tensor_layouts
from lowshard.reshard.refit import version_number
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_server import Member, Newest, VersionServer
from lowshard.reshard.version_store import ID_BYTES, VersionStore
from lowshard.reshard.version_wire import Endpoint, Table
from lowshard.tiling import Tiling
from lowshard.transfer.device_copies import DeviceCopies

Array = Any
_ANY = ("0.0.0.0", "::")
_Opened = tuple[
    int, FolderLock | None, tuple[Listener, ...], Newest | None, VersionServer | None, Path | None
]
"""Arguments of `_release_resources`."""
_ROUND_S = 1.0
"""Longest time that rank 0 waits for members before it tells the other ranks that it still does."""


class Publisher:
    """Offers versions of tensors to subscribers that were started apart from this job.

    A subscriber (`Subscriber`) is a job with any number of ranks, or one process without MPI, that knows the address
    and the token. It may join, leave, be killed and return at any time; it receives the newest version, whole, and no
    other subscriber waits for it. On this publisher's host it copies out of mapped memory; on other hosts it reads over
    TCP, from all ranks at once, with a connection for each pair of ranks.

    Each rank keeps one copy of its tensors for the newest version and one for the next, and one more for each
    subscriber that is still copying an older one: for the deadline of the communicator (`timeout_s`; 60 s without one)
    after it was offered, and as long as bytes of it are sent. A subscriber that was stopped for longer fails to take
    that version, and its next pull takes the newest.

    Collective: all ranks of the communicator make it, publish, and close it. It closes without waiting when its `with`
    block ends by an exception, when nothing refers to it any more, and at the end of the program. A forked child cannot
    use it, and closing it there changes nothing for the parent.

    Args:
        layouts: by name, what the ranks hold: a Layout, a Tiling or a TensorLayout.
        arrays: by name, this rank's local arrays; the same ones serve every version. JAX's never change: for those give
            NumPy's, and copy into them before each version.
        comm: the communicator; None for one rank.
        address: `unix:/folder` for subscribers of this host and user; or `tcp://host:port` (port 0: a free one; host
            0.0.0.0 or [::]: this host's addresses that other hosts reach, not loopback).
        token: the secret that subscribers must know, 16 bytes or more; by default a new one, in `token_file`.

    Attributes:
        address: what subscribers pass.
        token_file: where the token is kept, a file of mode 0600; None where the caller gave it.

    Every rank raises the same error.

    Raises:
        CommError: the address is invalid, in use, or of one host while ranks are on several; a foreign file there has a
            publisher's file name; the token is too short.
        LayoutError: a partial layout.
        BufferMismatchError: an array is not the one its layout says.
        MismatchError: ranks ask for different tensors or addresses.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout | Tiling | TensorLayout],
        arrays: Mapping[str, Array],
        comm: Communicator | None = None,
        *,
        address: str,
        token: bytes | None = None,
    ) -> None:
        self._alone = loopback(1)[0] if comm is None else None
        whole = self._alone if comm is None else control_of(comm)
        assert whole is not None
        self._closed, self._number, self._pid = False, 0, os.getpid()
        self._publishes, self._dropping = False, threading.RLock()
        """Whether a version is being copied, and the lock for that and for dropping snapshots."""
        self._version: int | None = None
        self._server: VersionServer | None = None
        self.token_file: Path | None = None
        self._lock: FolderLock | None = None
        self._listeners: list[Listener] = []
        self._when_lost: weakref.finalize[..., Publisher] | None = None
        with collective_step(whole, "Publisher") as step:
            self._layouts = tensor_layouts(layouts, whole.size)
            self._arrays = local_arrays(self._layouts, arrays, whole.rank)
            self._never_changes = never_change(arrays.values())
            self._copies = DeviceCopies(self._arrays.values(), whole.timeout_s)
            where = Address.parse(address)
            given = None if token is None else checked_token(token)
            said = [address, given is None, {n: x.to_json() for n, x in self._layouts.items()}]
            step.digest = text_digest(json.dumps(said, default=list))
            words = f"{address}, {'no ' if given is None else ''}token given, {in_words(self._layouts)}"
            step.said = lambda: words
        # A communicator of its own: a version may be published by another thread than the caller's.
        self._background = Background(whole, "lowshard publish")
        self._comm: Communicator = self._background.comm
        self._newest = Newest() if self._comm.rank == 0 else None
        try:
            self._open(where, given)
        except LowshardError:  # of all ranks
            self._end()
            raise
        except BaseException as found:
            self._leave(found)
            raise

    def _open(self, where: Address, given: bytes | None) -> None:
        """Open rank 0's listeners, share token and address, then open those of the other ranks."""
        comm, facts = self._comm, ["", "", "", ""]
        with collective_step(comm, "Publisher"):
            if comm.rank == 0:
                facts = self._open_first(where, given)
        facts = json.loads(share_text(comm, json.dumps(facts))[0])
        self.address, self.token_file = facts[0], Path(facts[3]) if facts[3] else None
        where, token, publisher_id = Address.parse(facts[0]), bytes.fromhex(facts[1]), facts[2]
        networks = share_text(comm, network_name())
        if where.folder is not None and len(set(networks)) > 1:
            raise CommError(
                f"{self.address} leads to one host, and ranks are on several; publish at tcp://host:port"
            )
        with collective_step(comm, "Publisher"):
            if comm.rank:
                try:
                    self._listeners = [_listener_of(where, comm.rank, token)]
                except OSError as found:
                    raise CommError(f"rank {comm.rank} cannot be reached by subscribers: {found}") from found
        endpoint = Endpoint(
            tuple(a for listener in self._listeners for a in listener.addresses),
            networks[comm.rank],
            os.getpid(),
        )
        rows = share_text(comm, json.dumps(endpoint.__dict__))
        table = Table(
            publisher_id,
            {name: layout.to_json() for name, layout in self._layouts.items()},
            tuple(Endpoint(**json.loads(row)) for row in rows),
        )
        self._store = VersionStore(
            self._layouts, comm.rank, bytes.fromhex(publisher_id), self._copies, sums=where.folder is None
        )
        self._server = VersionServer(self._listeners, self._store, publisher_id, self._newest, table)
        self._when_lost = weakref.finalize(self, _release_resources, *self._opened())

    def _open_first(self, where: Address, given: bytes | None) -> list[str]:
        """Open rank 0's listener and keep the token; return address, token, publisher id and token file as text."""
        token = new_token() if given is None else given
        if where.folder is not None:
            self._lock = FolderLock(where.folder)
        try:
            if where.folder is not None:
                self._listeners = [folder_listener(where.folder, token)]
            else:
                hosts = (where.host,) if where.host not in _ANY else addresses_towards(())
                self._listeners = [tcp_listener(hosts, where.port, token)]
                where = Address.parse(self._listeners[0].addresses[0])
        except OSError as error:
            is_taken = where.folder is None and error.errno == errno.EADDRINUSE
            advice = "; give another port, or 0 for a free one" if is_taken else ""
            raise CommError(f"no publisher can be at {where}: {error.strerror or error}{advice}") from error
        if given is None:
            self.token_file = where.token_file
            write_token(self.token_file, token)
        return [str(where), token.hex(), secrets.token_bytes(ID_BYTES).hex(), str(self.token_file or "")]

    def __repr__(self) -> str:
        offered = "no version" if self.version is None else f"version {self.version}"
        state = ", closed" if self._closed else ""
        return f"<Publisher at {self.address}: {offered} of {len(self._layouts)} tensors{state}>"

    # ---- versions

    @property
    def version(self) -> int | None:
        """The version that is offered, or None before the first."""
        return self._version

    def members(self) -> tuple[Member, ...]:
        """Return the connected subscribers, the same on every rank.

        Collective: all ranks of the communicator call this. With several it waits for a `publish` in the background.

        Raises:
            CommError: it is closed, or rank 0 has gone; every rank raises it.
            LowshardError: a pending error of a background publish.
        """
        found = () if self._newest is None else self._newest.members()
        if self._comm.size == 1:
            return found
        error = self._background.settle()
        if self._closed:
            raise CommError("this Publisher is closed; make a new one")
        with collective_step(self._comm, "members") as step:
            step.error = error
        rows = json.loads(share_text(self._comm, json.dumps([asdict(one) for one in found]))[0])
        return tuple(Member(**row) for row in rows)

    @overload
    def publish(self, version: int, wait: Literal[True] = True, *, stream: Stream = None) -> None: ...

    @overload
    def publish(self, version: int, wait: Literal[False], *, stream: Stream = None) -> Work: ...

    @overload
    def publish(self, version: int, wait: bool, *, stream: Stream = None) -> Work | None: ...

    def publish(self, version: int, wait: bool = True, *, stream: Stream = None) -> Work | None:
        """Offer the arrays' present content as a version.

        Collective: all ranks of the communicator call this, with one version. It returns when the arrays may change; it
        waits for no subscriber.

        Args:
            version: an integer from 0 to 2^63 - 1, above the last one.
            wait: False returns a `Work` at once, and the arrays may change when its `wait()` has returned. The next
                call of this publisher waits for it, and raises, on every rank, an error of it that no call has raised.
            stream: on GPUs, the CuPy or torch stream after whose work the arrays are read; by default the caller's
                current one, also in the background.

        Every rank raises the same error.

        Raises:
            PlanError: a version that is not such an integer, or a second one of arrays that never change; nothing has
                changed.
            StreamError: stream is no stream of the arrays' GPU; nothing has changed.
            MismatchError: ranks publish different versions; nothing has changed.
            CommError: wait is neither True nor False; nothing has changed. There is no memory for a snapshot; the last
                version stays on offer.
            PeerFailed, TimedOut: a rank did not come. The last version stays on offer where rank 0 lives.
        """
        if os.getpid() != self._pid:
            raise CommError(
                f"a Publisher is its process's, {self._pid}, and this is a forked child of it; make one here"
            )
        error = self._background.settle()
        if self._closed:  # so is its communicator: the ranks cannot agree
            raise CommError("this Publisher is closed; make a new one")
        try:
            wait = truth(wait, "wait is True or False", CommError)
        except CommError as found:
            wait, error = True, error or found
        try:
            self._copies.follow(stream)
        except LowshardError as found:
            error = error or found
        if wait:
            self._publish(version, error)
            return None
        return self._background.start(lambda: self._publish(version, error), f"publish({version})")

    def _publish(self, version: int, error: Exception | None) -> None:
        """Publish a version, or raise a pending error on all ranks."""
        with self._dropping:
            self._publishes = True
        try:
            self._offer(version, error)
        except LowshardError:  # perhaps only because the communicator was closed
            if self._closed:
                raise CommError("this Publisher was closed while it published a version") from None
            raise
        finally:
            with self._dropping:
                self._publishes = False
                if self._closed:  # closed by another thread, which left this to this one
                    self._drop()

    def _offer(self, version: int, error: Exception | None) -> None:
        """Copy the arrays as a version, and offer it."""
        comm = self._comm
        with collective_step(comm, "publish", said=lambda: f"version {version}") as step:
            step.error = error
            version = version_number(version)
            if self._version is not None and version <= self._version:
                raise PlanError(f"versions rise: version {self._version} is out, got {version}")
            if self._version is not None and self._never_changes:
                raise same_again(version)
            step.digest = version.to_bytes(8, "little")
        held = self._newest.held(comm.timeout_s) if self._newest is not None else set()
        if self._server is not None:
            held |= self._server.sending()
        rows = [json.loads(row) for row in share_text(comm, json.dumps([self._number + 1, *held]))]
        number = rows[0][0]  # rank 0's counts: after Ctrl-C another rank's may be ahead
        held = {one for row in rows for one in row[1:]}
        with collective_step(comm, "publish"):
            self._store.fill(self._arrays, number, held)
        self._number, self._version = number, version
        if self._newest is not None:
            self._newest.announce(version, self._number)

    # ---- life

    def close(self, timeout_s: float = 30.0) -> None:
        """Give connected subscribers time to get the newest version, then close. Closing twice is safe.

        It is closed afterwards, also if this raises: the address is free, and the memory of versions is freed.

        Collective: all ranks of the communicator call this.

        Args:
            timeout_s: how long to wait for members, in seconds; rank 0's counts.

        Every rank raises the same error.

        Raises:
            CommError: timeout_s is not a number of seconds; nobody is waited for.
            MismatchError: another rank does not close it.
            LowshardError: a pending error of a background publish.
        """
        if self._closed:
            return
        try:
            if os.getpid() == self._pid:
                self._close(timeout_s)
        except LowshardError:  # of all ranks
            self._end()
            raise
        except BaseException as found:
            self._leave(found)
            raise
        self._end()

    def _close(self, timeout_s: float) -> None:
        """Wait for members, and raise any rank's pending error on all ranks."""
        comm, wait_s, has_news = self._comm, 0.0, False
        pending_error = self._background.settle()
        try:
            with collective_step(comm, "close"):
                wait_s = number(timeout_s, "timeout_s is a number of seconds, 0 or more", CommError, 0)
            has_news = self._wait_for_members(wait_s, pending_error is not None)
            if comm.rank:  # before rank 0 frees the address
                self._release()
            with collective_step(comm, "close") as step:
                step.error = pending_error
        except (PeerFailed, TimedOut):  # nobody is waited for after a failure
            if has_news:
                raise
            if pending_error is not None:
                raise pending_error from None

    def _wait_for_members(self, wait_s: float, has_news: bool) -> bool:
        """Wait until all members have the newest version or time is over; return if any rank has an error."""
        end_s = time.monotonic() + wait_s
        while True:  # in rounds: rank 0 may wait longer than the communicator's deadline
            is_over = True
            if self._newest is not None and self._version is not None:
                left_s = max(0.0, end_s - time.monotonic())
                round_s = min(_ROUND_S, self._comm.timeout_s / 2, left_s)
                is_over = self._newest.wait_until_all_have_it(round_s) or left_s <= round_s
            rows = share(self._comm, np.array([is_over, has_news], np.int64))
            if rows[0][0]:
                return any(row[1] for row in rows)

    def _end(self) -> None:
        """Release everything, and close the communicator with the other ranks."""
        self._release()
        if os.getpid() == self._pid:
            with contextlib.suppress(CommError):  # after a rank's death the process's end does it
                self._background.close()

    def _leave(self, error: BaseException) -> None:
        """Release everything without the other ranks, which may not come."""
        self._release()
        if os.getpid() == self._pid:
            self._comm.__exit__(type(error), error, None)

    def _release(self) -> None:
        """Release this rank's resources, arrays and snapshots. Repeating it does nothing."""
        if self._when_lost is not None:
            self._when_lost.detach()
        self._closed, is_served = True, self._server is not None
        try:
            _release_resources(*self._opened())
        finally:
            if os.getpid() == self._pid:
                self._server, self._listeners = None, []
                with self._dropping:
                    if is_served and not self._publishes:
                        self._drop()

    def _opened(self) -> _Opened:
        token_file = self.token_file if self._comm.rank == 0 else None
        return self._pid, self._lock, tuple(self._listeners), self._newest, self._server, token_file

    def _drop(self) -> None:
        self._arrays = {}
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)


def _release_resources(
    pid: int,
    lock: FolderLock | None,
    listeners: Sequence[Listener],
    newest: Newest | None,
    server: VersionServer | None,
    token_file: Path | None,
) -> None:
    """Release what a rank has opened, each resource even if another fails."""
    is_own = os.getpid() == pid
    with contextlib.ExitStack() as stack:  # the last one first
        if lock is not None:
            stack.callback(lock.release)
        if server is None or not is_own:
            for listener in listeners:
                stack.callback(listener.close)
        if is_own and server is not None:
            stack.callback(server.close)
        if is_own and newest is not None:
            with newest.changed:
                newest.closing = True
                newest.changed.notify_all()
        if is_own and token_file is not None and listeners:
            stack.callback(remove_token, token_file, listeners[0].token)


def _listener_of(where: Address, rank: int, token: bytes) -> Listener:
    """Return the listener of a rank other than 0."""
    if where.folder is not None:
        return folder_listener(where.folder / f"rank-{rank}", token)
    own = {address for addresses in interface_addresses().values() for address in addresses}
    if is_loopback(where.host) or where.host in own or where.host in _ANY:
        hosts: tuple[str, ...] = (where.host,)
    else:
        hosts = addresses_towards([where.host])
    return tcp_listener(hosts, 0, token)
