"""The server of a publisher: a thread at the listeners, and one for each connection.

Only a connection's own thread ever waits for a subscriber; `publish` does not.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lowshard import dtypes
from lowshard.box import Box, is_within
from lowshard.checkpoint.catalog import crc32
from lowshard.comm.listener import Client, Listener
from lowshard.errors import KernelError
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard.version_store import Memory, Place, VersionStore
from lowshard.reshard.version_wire import (
    CHANGES_HEAD,
    CONTROL,
    DATA,
    WANT_S,
    WHOLE,
    Answer,
    Connection,
    ConnectionLost,
    Greeting,
    Request,
    Table,
    read_greeting,
    read_request,
)

NO_DELTA = Changes(0, 0, 0, None, 0)
_KEPT_PART = 8
"""Encodings are cached up to this part of a snapshot's bytes."""
_Key = tuple[int, str, tuple[Box, ...], int]
_GREETING_S = 10.0
_TURN_S = 0.5


@dataclass(frozen=True)
class Member:
    """A connected subscriber.

    Attributes:
        name: its name.
        host: its host.
        pid: process of its rank 0.
        ranks: how many ranks it has.
        version: what it serves, or None before the first.
    """

    name: str
    host: str
    pid: int
    ranks: int
    version: int | None = None


@dataclass
class _Lease:
    """A member, and the snapshot that is kept for it."""

    member: Member
    number: int = 0
    since_s: float = 0.0
    """When it was offered."""


@dataclass(frozen=True)
class _TensorRequest:
    """The boxes of a tensor that a subscriber requests."""

    place: Place
    changes: ChangeBoxes
    by_changes: bool  # False: always whole


@dataclass
class Newest:
    """The offered version and the members, on rank 0. Guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int | None = None
    number: int = 0
    closing: bool = False
    leases: dict[int, _Lease] = field(default_factory=dict)

    def held(self, limit_s: float) -> set[int]:
        """Return the snapshots that must not be overwritten; a member keeps one for so long after it was offered."""
        begin_s = time.monotonic() - limit_s
        with self.changed:
            kept = {lease.number for lease in self.leases.values() if lease.since_s >= begin_s}
            return {self.number, *kept} - {0}

    def announce(self, version: int, number: int) -> None:
        """Offer a version."""
        with self.changed:
            self.version, self.number = version, number
            self.changed.notify_all()

    def members(self) -> tuple[Member, ...]:
        """Return the members."""
        with self.changed:
            return tuple(lease.member for lease in self.leases.values())

    def wait_until_all_have_it(self, timeout_s: float) -> bool:
        """Wait until every member has the newest version; return whether that was within the time limit."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(lease.member.version == self.version for lease in self.leases.values()),
                min(timeout_s, threading.TIMEOUT_MAX),
            )


@dataclass
class _Search:
    """One search; later callers with the same key wait for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    found: Changes | None = None


class SharedSearch:
    """Finds changes between snapshots once for all members with the same layout; those of the newest are cached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = self._left_bytes = 0
        self._searches: dict[_Key, _Search] = {}

    def find(
        self,
        new: Memory,
        number: int,
        old: Memory,
        since: int,
        place: Place,
        boxes: ChangeBoxes,
        scratch: ScratchBuffer,
    ) -> Changes:
        """Return what differs in a tensor's boxes; not encoded if sending them whole is shorter."""
        search = self._search(new, number, (since, place.name, boxes.boxes, boxes.block_elems))
        with search.lock:
            if not search.is_over:
                found = _find(new, number, old, since, place, boxes, scratch)
                if self._keeps(number, found):
                    search.found = found
                search.is_over = True
                return found
        return _find(new, number, old, since, place, boxes, scratch) if search.found is None else search.found

    def _search(self, new: Memory, number: int, key: _Key) -> _Search:
        with self._lock:
            if number > self._number:
                self._number, self._searches = number, {}
                self._left_bytes = new.size_bytes // _KEPT_PART
            return self._searches.setdefault(key, _Search()) if number == self._number else _Search()

    def _keeps(self, number: int, found: Changes) -> bool:
        """Return whether to cache an encoding: for the newest snapshot, within the memory limit."""
        if found is NO_DELTA:
            return False
        size_bytes = 0 if found.encoded is None else int(found.encoded.size)
        with self._lock:
            if number != self._number or size_bytes > self._left_bytes:
                return False
            self._left_bytes -= size_bytes
            return True


def _find(
    new: Memory,
    number: int,
    old: Memory,
    since: int,
    place: Place,
    boxes: ChangeBoxes,
    scratch: ScratchBuffer,
) -> Changes:
    found = boxes.find(place.view(new.bytes), place.view(old.bytes), scratch, may_stop=True)
    return found if (new.number, old.number) == (number, since) else NO_DELTA


class VersionServer:
    """Serves the subscribers of one rank of a publisher, until it is closed."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        store: VersionStore,
        publisher_id: str,
        newest: Newest | None = None,
        table: Table | None = None,
    ) -> None:
        """Start the server's thread."""
        self._listeners, self._store, self._publisher_id = tuple(listeners), store, publisher_id
        self._newest, self._table = newest, table
        self._search = SharedSearch()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close this within
        self._conns: set[Connection] = set()
        self._sending: Counter[int] = Counter()
        self._wake, wakes = os.pipe()
        self._wakes = wakes
        self._thread = threading.Thread(target=self._attend, name="lowshard-publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections. In a forked child it does nothing."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        os.write(self._wakes, b"x")
        if threading.current_thread() is not self._thread:  # the garbage collector may run there
            self._thread.join()
        with self._lock:
            conns = list(self._conns)
        for conn in conns:
            conn.stop()  # its thread closes it
        os.close(self._wake)
        os.close(self._wakes)

    def _attend(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select(_TURN_S)
                for listener in self._listeners:
                    for client in listener.admit():
                        self._let_in(client)
        for listener in self._listeners:
            listener.close()

    def _let_in(self, client: Client) -> None:
        serves: dict[int, Callable[[Connection], None]] = {DATA: self._serve_data}
        if self._newest is not None and self._table is not None:
            serves[CONTROL] = self._serve_control
        serve = serves.get(client.purpose)
        if serve is None:
            client.connection.close()
            return
        try:
            conn = Connection(client.connection)
            with self._lock:
                self._conns.add(conn)
            threading.Thread(
                target=self._serve, args=(conn, serve), name="lowshard-subscriber", daemon=True
            ).start()
        except (OSError, RuntimeError, MemoryError):  # disconnected, or no thread; others are still served
            with self._lock:
                self._conns = {conn for conn in self._conns if conn.socket is not client.connection}
            client.connection.close()

    def _serve(self, conn: Connection, serve: Callable[[Connection], None]) -> None:
        try:
            with contextlib.suppress(ConnectionLost):
                serve(conn)
        finally:
            with self._lock:
                self._conns.discard(conn)
            conn.close()

    # ---- control

    def _serve_control(self, conn: Connection) -> None:
        newest = self._newest
        assert newest is not None
        greeting: Greeting = conn.receive_message(read_greeting, time.monotonic() + _GREETING_S)
        conn.send_message(self._table)
        lease = _Lease(Member(greeting.name, greeting.host, greeting.pid, greeting.ranks))
        with newest.changed:
            newest.leases[id(lease)] = lease
        try:
            while True:
                request: Request = conn.receive_message(read_request)
                if request.ask == "want":
                    conn.send_message(self._offer(conn, lease, request))
                elif request.ask == "done":
                    with newest.changed:
                        lease.number = 0
                        lease.member = replace(lease.member, version=request.version)
                        newest.changed.notify_all()
                else:
                    raise ConnectionLost(f"asked for {request.ask!r} over a control connection")
        finally:
            with newest.changed:
                del newest.leases[id(lease)]
                newest.changed.notify_all()

    def _offer(self, conn: Connection, lease: _Lease, request: Request) -> Answer:
        """Return an offer of the newest version and hold it; or, after a while, that there is none."""
        newest, end_s = self._newest, time.monotonic() + min(WANT_S, request.wait_s)
        assert newest is not None
        with newest.changed:
            lease.number = 0
            while True:
                left_s = end_s - time.monotonic()
                if newest.version is not None and (
                    request.newer_than is None or newest.version > request.newer_than
                ):
                    lease.number, lease.since_s = newest.number, time.monotonic()
                    return Answer("here", newest.version, newest.number)
                if newest.closing:
                    return Answer("closed")
                if left_s <= 0 or not conn.is_quiet():
                    return Answer("none")
                newest.changed.wait(left_s)

    # ---- data

    def _serve_data(self, conn: Connection) -> None:
        boxes: tuple[_TensorRequest, ...] = ()
        while True:
            request: Request = conn.receive_message(read_request)
            if request.ask == "boxes":
                boxes = self._wanted(request)
                continue
            found = self._store.find(request.number) if request.publisher_id == self._publisher_id else None
            if found is None:
                conn.send_message(Answer("gone"))
            elif request.ask == "map":
                conn.send_message(Answer("here", pid=os.getpid(), fd=found.fd, size_bytes=found.size_bytes))
            elif request.ask == "read":
                with self._holding(request.number):
                    conn.send_message(Answer("here"))
                    crc = 0
                    for wanted in boxes:
                        crc = self._send_whole(conn, found, wanted, crc)
                    self._end(conn, found, request.number, crc)
            elif request.ask == "changes":
                base = self._store.find(request.since)
                if base is None:
                    conn.send_message(Answer("none"))
                    continue
                with self._holding(request.number):
                    conn.send_message(Answer("here"))
                    crc = self._send_changes(conn, found, request.number, base, request.since, boxes)
                    self._end(conn, found, request.number, crc)
            else:
                raise ConnectionLost(f"asked for {request.ask!r} over a data connection")

    def sending(self) -> set[int]:
        """Return the snapshots that are being sent; a connection that takes no bytes is given up after STALLED_S."""
        with self._lock:
            return set(self._sending)

    @contextlib.contextmanager
    def _holding(self, number: int) -> Iterator[None]:
        with self._lock:
            self._sending[number] += 1
        try:
            yield
        finally:
            with self._lock:
                self._sending -= Counter([number])

    def _end(self, conn: Connection, found: Memory, number: int, crc: int) -> None:
        """Send the checksum, and whether the snapshot was still there."""
        conn.send(memoryview(crc.to_bytes(4, "little")))
        conn.send_message(Answer("here" if found.number == number else "gone"))

    def _wanted(self, request: Request) -> tuple[_TensorRequest, ...]:
        """Return the boxes of a request, checked."""
        found = []
        blocks = request.blocks or (1,) * len(request.boxes)
        if len(blocks) != len(request.boxes) or min(blocks, default=0) < 0:
            raise ConnectionLost(f"asked for {len(request.boxes)} tensors by blocks of {blocks}")
        for (name, boxes), block in zip(request.boxes, blocks, strict=True):
            place = self._store.places.get(name)
            if place is None or not boxes or not all(is_within(box, place.shape) for box in boxes):
                raise ConnectionLost(f"asked for {name!r}, which this rank does not have so")
            try:
                kept = ChangeBoxes(boxes, dtypes.get(place.dtype).itemsize_bytes, max(1, block))
            except KernelError as error:
                raise ConnectionLost(f"asked for {name!r} by blocks of {block}: {error}") from error
            found.append(_TensorRequest(place, kept, block > 0))
        return tuple(found)

    def _send_whole(self, conn: Connection, found: Memory, wanted: _TensorRequest, crc: int) -> int:
        """Send a tensor's boxes one after the other, each row-major; return the CRC-32 so far."""
        for box in wanted.changes.boxes:
            for data, crc_so_far in found.runs(wanted.place, box, crc):
                conn.send(data)
                crc = crc_so_far
        return crc

    def _send_changes(
        self,
        conn: Connection,
        found: Memory,
        number: int,
        base: Memory,
        since: int,
        boxes: Sequence[_TensorRequest],
    ) -> int:
        """Send the delta to another snapshot, tensor by tensor; return the CRC-32."""
        crc, scratch = 0, ScratchBuffer()
        for wanted in boxes:
            found_changes = NO_DELTA
            if wanted.by_changes:
                found_changes = self._search.find(
                    found, number, base, since, wanted.place, wanted.changes, scratch
                )
            encoded = found_changes.encoded
            units = WHOLE if encoded is None else found_changes.units
            head = CHANGES_HEAD.pack(
                units, found_changes.gaps_bytes, found_changes.lengths_bytes, found_changes.changed_elems
            )
            crc = crc32(head, crc)
            conn.send(memoryview(head))
            if encoded is None:
                crc = self._send_whole(conn, found, wanted, crc)
            else:
                crc = crc32(encoded.data, crc)
                conn.send(encoded.data)
        return crc
