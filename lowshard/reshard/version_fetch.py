"""How a rank of a subscriber gets its boxes from the ranks of a publisher: out of mapped memory, or over connections.

```
rank of the publisher on this host     its snapshot is mapped; boxes are copied out of it
on another host                        the boxes come over the connection to it
```

All ranks' boxes are fetched at the same time, a rank's in a thread that lives as long as the fetch. Where one fails,
all connections are ended, so that no other goes on, and what failed first is raised.
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
from lowshard.checkpoint.crc import crc32
from lowshard.comm.door import enter
from lowshard.comm.interface import network_name
from lowshard.errors import VerificationError
from lowshard.kernels.change_text import Changes
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
    Line,
    Lost,
    Request,
    Station,
    read_answer,
)
from lowshard.settings import CROSS_MEMORY

_KEPT_PART = 4
"""Texts are kept of less than so small a part of what the boxes have."""
ENTER_S = 5.0
"""How long a door of a publisher may take to let this rank in."""


@dataclass
class Fetched:
    """What a version has brought: see `Subscriber.report`."""

    dense_bytes: int = 0
    received_bytes: int = 0
    changed_elems: int = 0

    def add(self, other: Fetched) -> None:
        """Count what another part of the version has brought."""
        self.dense_bytes += other.dense_bytes
        self.received_bytes += other.received_bytes
        self.changed_elems += other.changed_elems


@dataclass(frozen=True)
class Wanted:
    """A version that is to be fetched."""

    number: int
    target: Mapping[str, Target]
    since: int = 0  # the snapshot that `served` holds; 0 to take all of the version
    served: Mapping[str, Target] = field(default_factory=dict)
    behind: int = 0  # the snapshot that `target` holds, the one before `since`; 0 where it holds none


@dataclass(frozen=True)
class _TensorBoxes:
    """Boxes of one tensor, in the order in which they come."""

    name: str  # of the tensor, in this job
    src_name: str  # the publisher's name of it
    src_boxes: tuple[Box, ...]  # in the array of the publisher's rank
    dst_boxes: tuple[Box, ...]  # the same elements in this rank's array


def _by_tensor(plan: ReshardPlan, moves: Iterable[Move]) -> tuple[_TensorBoxes, ...]:
    """Return the boxes that moves from one rank to another bring; those without elements do not come."""
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
    """The ranks of one publisher that have something for this rank."""

    def __init__(
        self,
        mark: str,
        stations: Sequence[Station],
        token: bytes,
        have: Mapping[str, TensorLayout],
        plan: ReshardPlan,
        rank: int,
    ) -> None:
        """Plan for a publisher; nothing is connected yet."""
        self.mark = mark
        self._peers = [
            _Peer(peer, stations[peer], (mark, token), places_of(have, peer)[0], boxes)
            for peer, moves in plan.for_rank(rank).receives.items()
            if (boxes := _by_tensor(plan, moves))
        ]

    def fetch(self, wanted: Wanted) -> Fetched:
        """Write a version's boxes into this rank's arrays; where that fails, connections are closed."""
        try:
            return _together([peer.job(wanted) for peer in self._peers], self.stop)
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Have a fetch that is under way fail soon. Any thread may call this."""
        for peer in self._peers:
            if peer.line is not None:
                peer.line.stop()

    def close(self) -> None:
        """Let go of connections and memory."""
        for peer in self._peers:
            peer.close()


class _Peer:
    """A rank of the publisher, and what this rank gets from it."""

    def __init__(
        self,
        rank: int,
        station: Station,
        secrets: tuple[str, bytes],
        places: Mapping[str, Place],
        boxes: Sequence[_TensorBoxes],
    ) -> None:
        self._rank, self._station, self._places, self._boxes = rank, station, places, boxes
        self._mark, self._token = secrets
        self._maps = False
        self._mapped: dict[tuple[int, int], Memory] = {}
        self._stream: _Stream | None = None
        self.line: Line | None = None

    def job(self, wanted: Wanted) -> Job:
        """Connect where that is not so yet; return what is to be done to get a version's boxes."""
        try:
            if self.line is None:
                self._maps = self._station.network == network_name() and CROSS_MEMORY.choice() != "off"
                self.line = self._connected()
            if self._maps:
                memory = self._memory(self.line, wanted.number)
                if memory is not None:
                    return partial(self._of_this_rank, partial(self._copy, wanted, memory))
                self._maps = False
            if self._stream is None:
                self._stream = _Stream(self.line, self._mark, self._boxes, self._places, wanted.target)
            return partial(self._of_this_rank, partial(self._stream.fetch, wanted))
        except Lost as lost:
            raise self._named(lost) from lost

    def _of_this_rank(self, job: Job) -> Fetched:
        try:
            return job()
        except Lost as lost:
            raise self._named(lost) from lost

    def _named(self, lost: Lost) -> Lost:
        return Lost(f"rank {self._rank} of the publisher: {lost}")

    def _connected(self) -> Line:
        try:
            return Line(enter(self._station.addresses, self._token, DATA, 0, ENTER_S))
        except ConnectionError as error:
            raise Lost(str(error)) from error

    def _memory(self, line: Line, number: int) -> Memory | None:
        """Return a snapshot mapped here, or None where it cannot be."""
        line.say(Request("map", self._mark, number=number))
        answer = _here(line)
        key = answer.pid, answer.fd
        self._mapped = {at: memory for at, memory in self._mapped.items() if memory.is_at(*at)}
        if key not in self._mapped:
            try:
                mark = bytes.fromhex(self._mark)
                self._mapped[key] = Memory.of_process(answer.pid, answer.fd, answer.size_bytes, mark)
            except (OSError, ValueError):
                return None
        return self._mapped[key]

    def _copy(self, wanted: Wanted, memory: Memory) -> Fetched:
        """Copy the boxes out of mapped memory."""
        fetched = Fetched()
        for boxes in self._boxes:
            place, into = self._places[boxes.src_name], wanted.target[boxes.name]
            for src_box, dst_box in zip(boxes.src_boxes, boxes.dst_boxes, strict=True):
                values = place.part(memory.bytes, src_box)
                into.put(dst_box, values)
                fetched.dense_bytes += values.nbytes
        if memory.number != wanted.number:
            raise Lost("it took its snapshot back while it was read")
        return fetched

    def close(self) -> None:
        """Let go of connections and memory."""
        if self.line is not None:
            self.line.close()
        self.line, self._stream, self._mapped = None, None, {}


class _Stream:
    """A connection to a rank of the publisher, and the boxes that come over it."""

    def __init__(
        self,
        line: Line,
        mark: str,
        boxes: Sequence[_TensorBoxes],
        places: Mapping[str, Place],
        target: Mapping[str, Target],
    ) -> None:
        """Say which boxes are meant, and how their changes are to be told."""
        self._line, self._mark, self._boxes = line, mark, boxes
        blocks = tuple(target[one.name].block_elems(one.dst_boxes) for one in boxes)
        self._changes = tuple(
            ChangeBoxes(one.dst_boxes, dtypes.get(places[one.src_name].dtype).itemsize_bytes, max(1, block))
            for one, block in zip(boxes, blocks, strict=True)
        )
        """By tensor, the boxes in this rank's array."""
        self._last = _Brought()
        asked = tuple((one.src_name, one.src_boxes) for one in boxes)
        line.say(Request("boxes", boxes=asked, blocks=blocks))

    def fetch(self, wanted: Wanted) -> Fetched:
        """Receive the boxes of a version, or what differs in them from the version before."""
        fetched = Fetched(dense_bytes=sum(kept.size_bytes for kept in self._changes))
        if not (wanted.since and self._take_changes(wanted, fetched)):
            self._take_whole(wanted, fetched)
        return fetched

    def _take_whole(self, wanted: Wanted, fetched: Fetched) -> None:
        """Receive all boxes."""
        self._line.say(Request("read", self._mark, number=wanted.number))
        _here(self._line)
        incoming = _Incoming(self._line)
        for boxes, kept in zip(self._boxes, self._changes, strict=True):
            incoming.fill(wanted.target[boxes.name], kept, fetched)
        incoming.end()

    def _take_changes(self, wanted: Wanted, fetched: Fetched) -> bool:
        """Receive what differs, and write it over what is served; return whether the publisher can tell."""
        self._line.say(Request("changes", self._mark, number=wanted.number, since=wanted.since))
        up = self._last.texts if self._last.leads(wanted.behind, wanted.since) else {}
        self._last = _Brought(wanted.since, wanted.number)
        for boxes, kept in zip(self._boxes, self._changes, strict=True):
            if boxes.name in up:
                wanted.target[boxes.name].write(kept, up[boxes.name])
        if self._line.hear(read_answer, time.monotonic() + STALLED_S).state != "here":
            return False
        incoming = _Incoming(self._line)
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
            text = np.frombuffer(incoming.take(sum(sizes)), np.uint8)
            changes = Changes(units, gaps, lengths, text, changed)
            if boxes.name not in up:
                into.copy(wanted.served[boxes.name], kept)
            into.write(kept, changes)
            if max(changes.cost_in_copied_bytes, _KEPT_PART * text.size) < kept.size_bytes:
                self._last.texts[boxes.name] = changes
            fetched.received_bytes += text.size
            fetched.changed_elems += changed
        incoming.end()
        return True


@dataclass(frozen=True)
class _Brought:
    """What differs between two snapshots, by tensor, where a text of it is kept."""

    since: int = 0
    number: int = 0
    texts: dict[str, Changes] = field(default_factory=dict)

    def leads(self, since: int, number: int) -> bool:
        """Say whether that is from one snapshot to another; 0 is none."""
        return since > 0 and (since, number) == (self.since, self.number)


class _Incoming:
    """Bytes that come over a line, with their checksum."""

    def __init__(self, line: Line) -> None:
        self._line, self._crc = line, 0

    def take(self, size_bytes: int) -> bytearray:
        """Return the next bytes."""
        raw = bytearray(size_bytes)
        self._receive(memoryview(raw))
        return raw

    def fill(self, target: Target, boxes: ChangeBoxes, fetched: Fetched) -> None:
        """Put boxes that come one behind the other, each row-major, in their place."""
        for box in boxes.boxes:
            target.receive(box, self._receive)
        fetched.received_bytes += boxes.size_bytes
        fetched.changed_elems += boxes.elems

    def _receive(self, raw: memoryview) -> None:
        self._line.receive(raw)
        self._crc = crc32(raw, self._crc)

    def end(self) -> None:
        """Compare the checksum."""
        said = bytearray(4)
        self._line.receive(memoryview(said))
        _here(self._line)
        if int.from_bytes(said, "little") != self._crc:
            raise Lost("what came has another checksum than what was sent")


def _here(line: Line) -> Answer:
    answer: Answer = line.hear(read_answer, time.monotonic() + STALLED_S)
    if answer.state != "here":
        raise Lost("the snapshot is there no more")
    return answer


def _together(jobs: Sequence[Job], stop: Callable[[], None]) -> Fetched:
    """Do jobs at the same time, one of them in this thread; return what they have brought when all have ended."""
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
