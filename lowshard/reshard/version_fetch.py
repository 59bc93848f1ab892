"""Fetches a subscriber rank's boxes from a publisher's ranks: from mapped memory, or over connections.

```
rank of the publisher on this host     its snapshot is mapped; boxes are copied out of it
on another host                        the boxes come over the connection to it
```

All ranks of the publisher are fetched from at the same time, each in a thread. If one fails, all connections are shut
down, and the first error is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lowshard import dtypes
from lowshard.box import Box
from lowshard.checkpoint.catalog import crc32
from lowshard.comm.interface import network_name
from lowshard.comm.listener import connect
from lowshard.errors import VerificationError
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard.reshard_move import Move
from lowshard.reshard.reshard_plan import ReshardPlan
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_store import Memory, Place, places_of
from lowshard.reshard.version_target import Target
from lowshard.reshard.version_wire import (
    CHANGES_HEAD,
    DATA,
    STALLED_S,
    WHOLE,
    Answer,
    Connection,
    ConnectionLost,
    Endpoint,
    Request,
    read_answer,
)
from lowshard.settings import CROSS_MEMORY

_KEPT_PART = 4
"""Encodings are kept that are smaller than this part of the boxes."""
ENTER_S = 5.0
"""Time limit of connecting to a publisher's rank."""


@dataclass
class Fetched:
    """The bytes and elements of a fetch: see `Subscriber.report`."""

    dense_bytes: int = 0
    received_bytes: int = 0
    changed_elems: int = 0

    def add(self, other: Fetched) -> None:
        """Add another part's counts."""
        self.dense_bytes += other.dense_bytes
        self.received_bytes += other.received_bytes
        self.changed_elems += other.changed_elems


@dataclass(frozen=True)
class FetchRequest:
    """A version to be fetched."""

    number: int
    target: Mapping[str, Target]
    since: int = 0  # the snapshot that `served` holds; 0 to take all of the version
    served: Mapping[str, Target] = field(default_factory=dict)
    behind: int = 0  # the snapshot that `target` holds, the one before `since`; 0 where it holds none


@dataclass(frozen=True)
class _TensorBoxes:
    """Boxes of one tensor, in the order in which they are sent."""

    name: str  # of the tensor, in this job
    src_name: str  # the publisher's name of it
    src_boxes: tuple[Box, ...]  # in the array of the publisher's rank
    dst_boxes: tuple[Box, ...]  # the same elements in this rank's array


def _by_tensor(plan: ReshardPlan, moves: Iterable[Move]) -> tuple[_TensorBoxes, ...]:
    """Return the non-empty boxes that moves from one rank to another bring, by tensor."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        if move.elems:
            found.setdefault(move.entry, []).append(move)
    return tuple(
        _TensorBoxes(
            plan.entries[entry].name,
            plan.entries[entry].src_name,
            tuple(move.src_box for move in some),
            tuple(move.dst_box for move in some),
        )
        for entry, some in found.items()
    )


Job = Callable[[], Fetched]


class Source:
    """The ranks of one publisher that this rank fetches from."""

    def __init__(
        self,
        publisher_id: str,
        endpoints: Sequence[Endpoint],
        token: bytes,
        have: Mapping[str, TensorLayout],
        plan: ReshardPlan,
        rank: int,
    ) -> None:
        """Plan for a publisher; nothing is connected yet."""
        self.publisher_id = publisher_id
        self._peers = [
            _Peer(peer, endpoints[peer], (publisher_id, token), places_of(have, peer)[0], boxes)
            for peer, moves in plan.for_rank(rank).receives.items()
            if (boxes := _by_tensor(plan, moves))
        ]

    def fetch(self, wanted: FetchRequest) -> Fetched:
        """Write a version's boxes into this rank's arrays; if that fails, close the connections."""
        try:
            return _run_concurrently([peer.job(wanted) for peer in self._peers], self.stop)
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Make a running fetch fail soon. Any thread may call this."""
        for peer in self._peers:
            if peer.conn is not None:
                peer.conn.stop()

    def close(self) -> None:
        """Close connections and unmap memory."""
        for peer in self._peers:
            peer.close()


class _Peer:
    """A rank of the publisher, and what this rank fetches from it."""

    def __init__(
        self,
        rank: int,
        endpoint: Endpoint,
        secrets: tuple[str, bytes],
        places: Mapping[str, Place],
        boxes: Sequence[_TensorBoxes],
    ) -> None:
        self._rank, self._endpoint, self._places, self._boxes = rank, endpoint, places, boxes
        self._publisher_id, self._token = secrets
        self._maps = False
        self._mapped: dict[tuple[int, int], Memory] = {}
        self._stream: _Stream | None = None
        self.conn: Connection | None = None

    def job(self, wanted: FetchRequest) -> Job:
        """Connect if needed; return a function that fetches a version's boxes."""
        try:
            if self.conn is None:
                self._maps = self._endpoint.network == network_name() and CROSS_MEMORY.choice() != "off"
                self.conn = Connection(connect(self._endpoint.addresses, self._token, DATA, 0, ENTER_S))
            if self._maps:
                memory = self._memory(self.conn, wanted.number)
                if memory is not None:
                    return partial(self._of_this_rank, partial(self._copy, wanted, memory))
                self._maps = False
            if self._stream is None:
                self._stream = _Stream(
                    self.conn, self._publisher_id, self._boxes, self._places, wanted.target
                )
            return partial(self._of_this_rank, partial(self._stream.fetch, wanted))
        except (ConnectionError, ConnectionLost) as lost:
            raise self._named(lost) from lost

    def _of_this_rank(self, job: Job) -> Fetched:
        try:
            return job()
        except ConnectionLost as lost:
            raise self._named(lost) from lost

    def _named(self, lost: Exception) -> ConnectionLost:
        return ConnectionLost(f"rank {self._rank} of the publisher: {lost}")

    def _memory(self, conn: Connection, number: int) -> Memory | None:
        """Return a snapshot mapped here, or None if that is impossible."""
        conn.send_message(Request("map", self._publisher_id, number=number))
        answer = _expect_snapshot(conn)
        key = answer.pid, answer.fd
        self._mapped = {at: memory for at, memory in self._mapped.items() if memory.is_at(*at)}
        if key not in self._mapped:
            try:
                publisher_id = bytes.fromhex(self._publisher_id)
                self._mapped[key] = Memory.of_process(answer.pid, answer.fd, answer.size_bytes, publisher_id)
            except (OSError, ValueError):
                return None
        return self._mapped[key]

    def _copy(self, wanted: FetchRequest, memory: Memory) -> Fetched:
        """Copy the boxes out of mapped memory."""
        fetched = Fetched()
        for boxes in self._boxes:
            place, into = self._places[boxes.src_name], wanted.target[boxes.name]
            for src_box, dst_box in zip(boxes.src_boxes, boxes.dst_boxes, strict=True):
                values = place.part(memory.bytes, src_box)
                into.put(dst_box, values)
                fetched.dense_bytes += values.nbytes
        if memory.number != wanted.number:
            raise ConnectionLost("it took its snapshot back while it was read")
        return fetched

    def close(self) -> None:
        """Close the connection and unmap memory."""
        if self.conn is not None:
            self.conn.close()
        self.conn, self._stream, self._mapped = None, None, {}


class _Stream:
    """A connection to a rank of the publisher, and the boxes fetched over it."""

    def __init__(
        self,
        conn: Connection,
        publisher_id: str,
        boxes: Sequence[_TensorBoxes],
        places: Mapping[str, Place],
        target: Mapping[str, Target],
    ) -> None:
        """Send the request for the boxes and the units of their encodings."""
        self._connection, self._publisher_id, self._boxes = conn, publisher_id, boxes
        blocks = tuple(target[one.name].block_elems(one.dst_boxes) for one in boxes)
        self._changes = tuple(
            ChangeBoxes(one.dst_boxes, dtypes.get(places[one.src_name].dtype).itemsize_bytes, max(1, block))
            for one, block in zip(boxes, blocks, strict=True)
        )
        """By tensor, the boxes in this rank's array."""
        self._last = _LastDelta()
        asked = tuple((one.src_name, one.src_boxes) for one in boxes)
        conn.send_message(Request("boxes", boxes=asked, blocks=blocks))

    def fetch(self, wanted: FetchRequest) -> Fetched:
        """Receive the boxes of a version, or only the delta."""
        fetched = Fetched(dense_bytes=sum(kept.size_bytes for kept in self._changes))
        if not (wanted.since and self._take_changes(wanted, fetched)):
            self._take_whole(wanted, fetched)
        return fetched

    def _take_whole(self, wanted: FetchRequest, fetched: Fetched) -> None:
        """Receive all boxes."""
        self._connection.send_message(Request("read", self._publisher_id, number=wanted.number))
        _expect_snapshot(self._connection)
        incoming = _Incoming(self._connection)
        for boxes, kept in zip(self._boxes, self._changes, strict=True):
            incoming.fill(wanted.target[boxes.name], kept, fetched)
        incoming.end()

    def _take_changes(self, wanted: FetchRequest, fetched: Fetched) -> bool:
        """Receive the delta and apply it; return whether the publisher has the base version."""
        self._connection.send_message(
            Request("changes", self._publisher_id, number=wanted.number, since=wanted.since)
        )
        up = self._last.encoded if self._last.spans(wanted.behind, wanted.since) else {}
        self._last = _LastDelta(wanted.since, wanted.number)
        for boxes, kept in zip(self._boxes, self._changes, strict=True):
            if boxes.name in up:
                wanted.target[boxes.name].write(kept, up[boxes.name])
        if self._connection.receive_message(read_answer, time.monotonic() + STALLED_S).state != "here":
            return False
        incoming = _Incoming(self._connection)
        for boxes, kept in zip(self._boxes, self._changes, strict=True):
            units, gaps, lengths, changed = CHANGES_HEAD.unpack(incoming.take(CHANGES_HEAD.size))
            into = wanted.target[boxes.name]
            if units == WHOLE:
                incoming.fill(into, kept, fetched)
                continue
            sizes = units * kept.unit_bytes, gaps, lengths
            if min(sizes) < 0 or sum(sizes) > kept.size_bytes:
                raise VerificationError(
                    f"{sum(sizes)} bytes were said to be what has changed of {kept.size_bytes}"
                )
            encoded = np.frombuffer(incoming.take(sum(sizes)), np.uint8)
            changes = Changes(units, gaps, lengths, encoded, changed)
            is_apart = wanted.served[boxes.name] is not into  # else it holds what the delta applies to
            if is_apart and boxes.name not in up:
                into.copy(wanted.served[boxes.name], kept)
            into.write(kept, changes)
            if is_apart and max(changes.cost_in_copied_bytes, _KEPT_PART * encoded.size) < kept.size_bytes:
                self._last.encoded[boxes.name] = changes
            fetched.received_bytes += encoded.size
            fetched.changed_elems += changed
        incoming.end()
        return True


@dataclass(frozen=True)
class _LastDelta:
    """The encodings kept of the last delta, by tensor."""

    since: int = 0
    number: int = 0
    encoded: dict[str, Changes] = field(default_factory=dict)

    def spans(self, since: int, number: int) -> bool:
        """Return whether it leads from one snapshot to another; 0 is none."""
        return since > 0 and (since, number) == (self.since, self.number)


class _Incoming:
    """Bytes received over a connection, with their checksum."""

    def __init__(self, conn: Connection) -> None:
        self._connection, self._crc = conn, 0

    def take(self, size_bytes: int) -> bytearray:
        """Return the next bytes."""
        raw = bytearray(size_bytes)
        self._receive(memoryview(raw))
        return raw

    def fill(self, target: Target, boxes: ChangeBoxes, fetched: Fetched) -> None:
        """Receive boxes into a target, one after the other, each row-major."""
        for box in boxes.boxes:
            target.receive(box, self._receive)
        fetched.received_bytes += boxes.size_bytes
        fetched.changed_elems += boxes.elems

    def _receive(self, raw: memoryview) -> None:
        self._connection.receive(raw)
        self._crc = crc32(raw, self._crc)

    def end(self) -> None:
        """Compare the checksum."""
        said = bytearray(4)
        self._connection.receive(memoryview(said))
        _expect_snapshot(self._connection)
        if int.from_bytes(said, "little") != self._crc:
            raise ConnectionLost("what came has another checksum than what was sent")


def _expect_snapshot(conn: Connection) -> Answer:
    answer: Answer = conn.receive_message(read_answer, time.monotonic() + STALLED_S)
    if answer.state != "here":
        raise ConnectionLost("the snapshot is there no more")
    return answer


def _run_concurrently(jobs: Sequence[Job], stop: Callable[[], None]) -> Fetched:
    """Run jobs concurrently, one of them in this thread; return the sum of their counts."""
    fetched, failed = Fetched(), list[BaseException]()
    lock = threading.Lock()

    def run(job: Job) -> None:
        try:
            found = job()
            with lock:
                fetched.add(found)
        except BaseException as error:
            with lock:
                failed.append(error)
            stop()

    threads = [
        threading.Thread(target=run, args=(job,), name="lowshard fetch", daemon=True) for job in jobs[1:]
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for job in jobs[:1]:
            run(job)
        for thread in started:
            thread.join()
    except BaseException:  # Ctrl-C, or no thread could be started
        stop()
        for thread in started:
            thread.join()
        raise
    if failed:
        raise failed[0]
    return fetched
