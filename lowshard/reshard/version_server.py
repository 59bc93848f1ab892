"""The side of a publisher that answers: a thread at the doors, and one for each connection that was let in.

Nothing here waits for a subscriber but the thread that answers it; `publish` never does.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lowshard import dtypes
from lowshard.box import is_within
from lowshard.checkpoint.crc import crc32
from lowshard.comm.door import Door, Guest
from lowshard.errors import KernelError
from lowshard.kernels.change_search import Room
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard.shared_search import NOT_TOLD, SharedSearch
from lowshard.reshard.version_store import Memory, Place, VersionStore
from lowshard.reshard.version_wire import (
    CHANGES_HEAD,
    CONTROL,
    DATA,
    WANT_S,
    WHOLE,
    Answer,
    Greeting,
    Line,
    Lost,
    Request,
    Table,
    read_greeting,
    read_request,
)

_GREETING_S = 10.0
_TURN_S = 0.5


@dataclass(frozen=True)
class Member:
    """A subscriber that is in touch.

    Attributes:
        name: what it calls itself.
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


@dataclass(frozen=True)
class _Wanted:
    """What a subscriber wants of a tensor."""

    place: Place
    changes: ChangeBoxes
    by_changes: bool  # else they always come whole


@dataclass
class Newest:
    """What is offered, and to whom; on rank 0. All of it is read and written under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int | None = None
    number: int = 0
    closing: bool = False
    leases: dict[int, _Lease] = field(default_factory=dict)

    def held(self) -> set[int]:
        """Return the snapshots that may not be written over."""
        with self.changed:
            return {self.number, *(lease.number for lease in self.leases.values())} - {0}

    def announce(self, version: int, number: int) -> None:
        """Offer a version from now on."""
        with self.changed:
            self.version, self.number = version, number
            self.changed.notify_all()

    def members(self) -> tuple[Member, ...]:
        """Return who is in touch."""
        with self.changed:
            return tuple(lease.member for lease in self.leases.values())

    def wait_until_all_have_it(self, timeout_s: float) -> bool:
        """Wait until every member has the newest version, or the time is over; return whether they have."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(lease.member.version == self.version for lease in self.leases.values()),
                min(timeout_s, threading.TIMEOUT_MAX),
            )


class VersionServer:
    """Answers the subscribers of one rank of a publisher, until it is closed."""

    def __init__(
        self,
        doors: Sequence[Door],
        store: VersionStore,
        mark: str,
        newest: Newest | None = None,
        table: Table | None = None,
    ) -> None:
        """Begin to answer."""
        self._doors, self._store, self._mark = tuple(doors), store, mark
        self._newest, self._table = newest, table
        self._search = SharedSearch()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close this within
        self._lines: set[Line] = set()
        self._wake, wakes = os.pipe()
        self._wakes = wakes
        self._thread = threading.Thread(target=self._attend, name="lowshard-publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more and end all connections. In a forked child they are left to the parent."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        os.write(self._wakes, b"x")
        if threading.current_thread() is not self._thread:  # where the garbage collector runs there
            self._thread.join()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.stop()  # its thread closes it
        os.close(self._wake)
        os.close(self._wakes)

    def _attend(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for door in self._doors:
                selector.register(door, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select(_TURN_S)
                for door in self._doors:
                    for guest in door.admit():
                        self._let_in(guest)
        for door in self._doors:
            door.close()

    def _let_in(self, guest: Guest) -> None:
        serves: dict[int, Callable[[Line], None]] = {DATA: self._serve_data}
        if self._newest is not None and self._table is not None:
            serves[CONTROL] = self._serve_control
        serve = serves.get(guest.purpose)
        if serve is None:
            guest.connection.close()
            return
        try:
            line = Line(guest.connection)
            with self._lock:
                self._lines.add(line)
            threading.Thread(
                target=self._serve, args=(line, serve), name="lowshard-subscriber", daemon=True
            ).start()
        except (OSError, RuntimeError, MemoryError):  # gone already, or no thread: others are let in still
            with self._lock:
                self._lines = {line for line in self._lines if line.connection is not guest.connection}
            guest.connection.close()

    def _serve(self, line: Line, serve: Callable[[Line], None]) -> None:
        try:
            with contextlib.suppress(Lost):
                serve(line)
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    # ---- control

    def _serve_control(self, line: Line) -> None:
        newest = self._newest
        assert newest is not None
        greeting: Greeting = line.hear(read_greeting, time.monotonic() + _GREETING_S)
        line.say(self._table)
        lease = _Lease(Member(greeting.name, greeting.host, greeting.pid, greeting.ranks))
        with newest.changed:
            newest.leases[id(lease)] = lease
        try:
            while True:
                request: Request = line.hear(read_request)
                if request.ask == "want":
                    line.say(self._offer(line, lease, request))
                elif request.ask == "done":
                    with newest.changed:
                        lease.number = 0
                        lease.member = replace(lease.member, version=request.version)
                        newest.changed.notify_all()
                else:
                    raise Lost(f"asked for {request.ask!r} over a control connection")
        finally:
            with newest.changed:
                del newest.leases[id(lease)]
                newest.changed.notify_all()

    def _offer(self, line: Line, lease: _Lease, request: Request) -> Answer:
        """Return an offer of the newest version, kept from now on; or that there is none, after a while."""
        newest, end_s = self._newest, time.monotonic() + min(WANT_S, request.wait_s)
        assert newest is not None
        with newest.changed:
            lease.number = 0
            while True:
                left_s = end_s - time.monotonic()
                if newest.version is not None and (
                    request.newer_than is None or newest.version > request.newer_than
                ):
                    lease.number = newest.number
                    return Answer("here", newest.version, newest.number)
                if newest.closing:
                    return Answer("closed")
                if left_s <= 0 or not line.is_quiet():
                    return Answer("none")
                newest.changed.wait(left_s)

    # ---- data

    def _serve_data(self, line: Line) -> None:
        boxes: tuple[_Wanted, ...] = ()
        while True:
            request: Request = line.hear(read_request)
            if request.ask == "boxes":
                boxes = self._wanted(request)
                continue
            found = self._store.find(request.number) if request.mark == self._mark else None
            if found is None:
                line.say(Answer("gone"))
            elif request.ask == "map":
                line.say(Answer("here", pid=os.getpid(), fd=found.fd, size_bytes=found.size_bytes))
            elif request.ask == "read":
                line.say(Answer("here"))
                crc = 0
                for wanted in boxes:
                    crc = self._send_whole(line, found, wanted, crc)
                self._end(line, found, request.number, crc)
            elif request.ask == "changes":
                base = self._store.find(request.since)
                if base is None:
                    line.say(Answer("none"))
                    continue
                line.say(Answer("here"))
                crc = self._send_changes(line, found, request.number, base, request.since, boxes)
                self._end(line, found, request.number, crc)
            else:
                raise Lost(f"asked for {request.ask!r} over a data connection")

    def _end(self, line: Line, found: Memory, number: int, crc: int) -> None:
        """Say the checksum of what was sent, and whether it was that snapshot until now."""
        line.send(memoryview(crc.to_bytes(4, "little")))
        line.say(Answer("here" if found.number == number else "gone"))

    def _wanted(self, request: Request) -> tuple[_Wanted, ...]:
        """Return the boxes of a request, checked."""
        found = []
        blocks = request.blocks or (1,) * len(request.boxes)
        if len(blocks) != len(request.boxes) or min(blocks, default=0) < 0:
            raise Lost(f"asked for {len(request.boxes)} tensors by blocks of {blocks}")
        for (name, boxes), block in zip(request.boxes, blocks, strict=True):
            place = self._store.places.get(name)
            if place is None or not boxes or not all(is_within(box, place.shape) for box in boxes):
                raise Lost(f"asked for {name!r}, which this rank does not have so")
            try:
                kept = ChangeBoxes(boxes, dtypes.get(place.dtype).itemsize_bytes, max(1, block))
            except KernelError as error:
                raise Lost(f"asked for {name!r} by blocks of {block}: {error}") from error
            found.append(_Wanted(place, kept, block > 0))
        return tuple(found)

    def _send_whole(self, line: Line, found: Memory, wanted: _Wanted, crc: int) -> int:
        """Send a tensor's boxes one behind the other, each row-major; return the CRC-32 of all bytes so far."""
        for box in wanted.changes.boxes:
            for data, crc_so_far in found.runs(wanted.place, box, crc):
                line.send(data)
                crc = crc_so_far
        return crc

    def _send_changes(
        self, line: Line, found: Memory, number: int, base: Memory, since: int, boxes: Sequence[_Wanted]
    ) -> int:
        """Send what differs from another snapshot, tensor by tensor; return the CRC-32 of all bytes."""
        crc, room = 0, Room()
        for wanted in boxes:
            told = NOT_TOLD
            if wanted.by_changes:
                told = self._search.find(found, number, base, since, wanted.place, wanted.changes, room)
            text = told.text
            units = WHOLE if text is None else told.units
            head = CHANGES_HEAD.pack(units, told.gaps_bytes, told.lengths_bytes, told.changed_elems)
            crc = crc32(head, crc)
            line.send(memoryview(head))
            if text is None:
                crc = self._send_whole(line, found, wanted, crc)
            else:
                crc = crc32(text.data, crc)
                line.send(text.data)
        return crc
