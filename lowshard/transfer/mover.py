"""Moves items of many arrays repeatedly: readable sources are read in place, the rest is sent in rounds.

In a round each rank sends one bucket and receives one. Senders and receivers are numbered; in step k, sender i sends to
receiver i + k. So every rank is in at most one pair each way at a time, in as many steps as the longer list has ranks.
A step takes as many rounds as its longest stream has buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from lowshard import dtypes
from lowshard.box import shape_of
from lowshard.comm.agreement import collective_step, share, trade
from lowshard.comm.communicator import Communicator
from lowshard.comm.reach import Published
from lowshard.comm.work import Work
from lowshard.errors import CommError, VerificationError
from lowshard.kernels.buffer import STREAM_FROM_BYTES, address
from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.engine import engine_for
from lowshard.transfer.buckets import Bucket, Part, Piece, bands_of, buckets_of
from lowshard.transfer.conversion import Conversion, together
from lowshard.transfer.huge_pages import settle
from lowshard.transfer.item import Item, bytes_of
from lowshard.transfer.spans import BoxCopy, Span, can_read, inner_span, is_worth_it, packed_span

Array = Any
Streams = Mapping[int, Sequence[Item]]
"""Items by peer, in the order they are sent."""

_STEP, _FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_FIRST_SHIFT, _LAST_SHIFT = 32, 29
_MASK = (1 << 64) - 1
NEAR_BUCKET_BYTES = 2 << 20  # of one that peers read in place; smaller ones need more rounds
NEAR_STREAM_BYTES = 64 << 10  # such buckets from here on are packed past the caches: two fill a core's own


# ---- rounds: data is packed into one of a rank's two buffers while peers read the other


def nothing(*_: object) -> None:
    """Do nothing."""


def run_rounds(
    numbers: range,
    fill: Callable[[int], object],
    meet: Callable[[int], object],
    take: Callable[[int], object],
    local: Callable[[int], object] = nothing,
    *,
    ahead: bool = True,
) -> None:
    """Run rounds, the same on all ranks that synchronise. Rounds must not depend on data of the round before."""
    if numbers:
        fill(numbers[0])
    for number in numbers:
        meet(number)
        if ahead and number + 1 in numbers:  # so that messages are under way; else peers read cached data
            fill(number + 1)
        local(number)
        take(number)
        if not ahead and number + 1 in numbers:
            fill(number + 1)


class Message(NamedTuple):
    """What one rank sends another in a round: its range in the send or receive buffer."""

    peer: int
    start: int
    stop: int


class RoundMessages:
    """Non-blocking messages of rounds: packing, sending and unpacking overlap."""

    def __init__(
        self, comm: Communicator, out: Sequence[Array], into: Sequence[Array], sends: Sequence[Sequence[Message]],
        receives: Sequence[Sequence[Message]],
    ) -> None:  # fmt: skip
        self._comm, self._out, self._into, self._sends, self._receives = comm, out, into, sends, receives
        self._sent: list[list[Work]] = [[], []]
        self._coming: list[list[Work]] = [[], []]

    def make_room(self, number: int) -> None:
        """Before a round is packed: wait for the sends of its buffer, and post the round's receives."""
        half = number & 1
        _wait(self._sent[half])
        for r, a, b in self._receives[number]:
            self._coming[half].append(self._comm.start.recv(self._into[half][a:b], r))

    def send(self, number: int) -> None:
        """Send a packed round."""
        half = number & 1
        for r, a, b in self._sends[number]:
            self._sent[half].append(self._comm.start.send(self._out[half][a:b], r))

    def take(self, number: int) -> dict[int, Array]:
        """Wait for a round's messages, and return them by rank."""
        half = number & 1
        _wait(self._coming[half])
        return {r: self._into[half][a:b] for r, a, b in self._receives[number]}

    def finish(self) -> None:
        """Wait for all sends."""
        for works in self._sent:
            _wait(works)


def _wait(works: list[Work]) -> None:
    while works:
        works.pop(0).wait()


# ---- the mover


class Mover:
    """Prepared items: addresses looked up, buckets laid out, memory allocated."""

    def __init__(
        self, comm: Communicator, sends: Streams, receives: Streams, copies: Sequence[Item],
        published: Sequence[Array | None], conversion: Conversion | None, *, by_memory: bool,
        in_place: bool, checksums: bool, staging_bytes: int, like: Mover | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._conversion = comm, conversion
        self._checksums, self._copies = checksums, copies
        self._near = frozenset(comm.reach.peers) if by_memory else frozenset((comm.rank,))
        self._near_bucket_bytes, self._far_bucket_bytes = bucket_sizes(comm, by_memory, staging_bytes)
        self._anchor = comm.xp.zeros(64, np.uint8)
        self._has_run = self._reads = False
        self._unsettled: list[Array] = []
        self._mapped: BoxCopy | None = None
        self._across: dict[int, BoxCopy] = {}
        self._seen: Published | None = None
        self._out: list[Array] = []
        self._into: list[Array] = []
        self._theirs: Published | None = None
        self._meets = False
        self._slots: dict[tuple[int, int], Array] = {}
        self.version = 0
        sent, received = _items(sends), _items(receives)
        self.sent_bytes = sum(_wire_bytes(i.sent) for i in sent)
        self.received_bytes = sum(_wire_bytes(i.got) for i in received)
        self.copied_bytes = sum(i.size_bytes for i in copies)
        self._near_sent = sum(_wire_bytes(i.sent) for r in sends if r in self._near for i in sends[r])
        self._near_received = sum(
            _wire_bytes(i.got) for r in receives if r in self._near for i in receives[r]
        )
        shares = by_memory and len(set(comm.reach.homes)) < comm.size  # the same on all ranks
        if in_place and shares:
            sends, receives = self._find_readable(sends, receives, published)
        self._schedule_rounds(sends, receives, shares, like)
        self.find_local()

    @property
    def buckets(self) -> int:
        """Buckets that this rank sends in a run."""
        return sum(out is not None for out, _ in self._steps)

    @property
    def staging_bytes(self) -> int:
        """Bytes allocated for buckets."""
        return sum(buffer.nbytes for buffer in (*self._out, *self._into))

    @property
    def reads_across(self) -> bool:
        """Whether this rank reads private memory of others."""
        return bool(self._across)

    # ---- read in place

    def _find_readable(
        self, sends: Streams, receives: Streams, published: Sequence[Array | None]
    ) -> tuple[Streams, Streams]:
        """Find the items to read in place; return the rest."""
        comm, reach = self._comm, self._comm.reach
        self._reads = True
        with comm.turn("a reshard"):
            seen = self._seen = reach.publish(published)
        mapped: list[tuple[Item, Span]] = []
        across: dict[int, list[tuple[Item, Span]]] = {}
        left: dict[int, list[Item]] = {}
        for peer, items in receives.items():
            readable = self._readable(peer, items, seen) if peer in self._near and reach.crosses else {}
            for item in items:
                span = item.remote_span if peer in self._near and not item.is_converted else None
                view = None if span is None else seen.view(peer, item.array)
                if span is not None and view is not None:
                    mapped.append((item, span._replace(at=span.at + address(view))))
                elif span is not None and readable.get(item.array) and is_worth_it(span, item.target_span()):
                    at = span.at + seen.address(peer, item.array)
                    across.setdefault(peer, []).append((item, span._replace(at=at)))
                else:
                    left.setdefault(peer, []).append(item)
        if reach.crosses:
            self._unsettled = [a for a in published if a is not None and a.nbytes and not reach.maps(a)]
        base = address(self._anchor)
        self._mapped = _copy_between(mapped, base, base)
        self._across = {peer: _copy_between(pairs, 0, base) for peer, pairs in across.items()}
        return self._ask_receivers(sends, receives, left), left

    def _readable(self, peer: int, items: Sequence[Item], seen: Published) -> dict[int, bool]:
        """Return, by array, whether this process may read a peer's private arrays."""
        sizes: dict[int, int] = {}
        for item in items:
            span = item.remote_span
            if span is not None and seen.view(peer, item.array) is None and seen.address(peer, item.array):
                steps = zip(span.extents, span.strides, strict=True)
                end = span.at + span.itemsize + sum((n - 1) * step for n, step in steps)
                sizes[item.array] = max(sizes.get(item.array, 1), end)
        if not sizes:
            return {}
        stretches = [(seen.address(peer, array), size) for array, size in sizes.items()]
        return dict(zip(sizes, can_read(self._comm.reach.pid(peer), stretches), strict=True))

    def _ask_receivers(self, sends: Streams, receives: Streams, left: Streams) -> dict[int, list[Item]]:
        """Return this rank's items that receivers do not read themselves."""
        comm = self._comm
        ranks = range(comm.size)
        wanted = [np.zeros(len(receives.get(r, ())), np.uint8) for r in ranks]
        for peer, items in receives.items():
            numbers = {item.number for item in left.get(peer, ())}
            wanted[peer][:] = [item.number in numbers for item in items]
        counts = [len(sends.get(r, ())) for r in ranks]
        asked = trade(comm, np.concatenate(wanted), [w.size for w in wanted], counts)
        found: dict[int, list[Item]] = {}
        for peer, end in enumerate(accumulate(counts)):
            if counts[peer]:
                mine = [i for i, a in zip(sends[peer], asked[end - counts[peer] : end], strict=True) if a]
                if mine:
                    found[peer] = mine
        return found

    def _read(self, step: collective_step) -> None:
        """Read all items that are read in place."""
        if self._mapped is not None:
            self._mapped.run(self._anchor, self._anchor)
        me, size = self._comm.rank, self._comm.size
        for peer in sorted(self._across, key=lambda peer: (peer - me) % size):
            pid = self._comm.reach.pid(peer)
            step.attempt(self._across[peer].read_across, peer, pid, 0, self._anchor)

    # ---- sent in rounds

    def _schedule_rounds(self, sends: Streams, receives: Streams, shares: bool, like: Mover | None) -> None:
        """Assign buckets to rounds, and allocate memory."""
        comm = self._comm
        out, incoming = self._buckets(sends, True), self._buckets(receives, False)
        turns = 1 + max((turn for turn, _ in (*out, *incoming)), default=0)
        said = np.array([bool(out), bool(incoming), turns], np.int64)
        rows = share(comm.control, said)
        senders, receivers = ([r for r, row in enumerate(rows) if row[i]] for i in (0, 1))
        steps = max(len(senders), len(receivers))
        turns = max(int(row[2]) for row in rows)
        lengths = np.zeros(turns * steps, np.int64)
        to_by, source_by = {}, {}
        for (turn, peer), buckets in out.items():
            place = turn * steps + (receivers.index(peer) - senders.index(comm.rank)) % steps
            to_by[place], lengths[place] = peer, len(buckets)
        for (turn, peer), buckets in incoming.items():
            place = turn * steps + (receivers.index(comm.rank) - senders.index(peer)) % steps
            source_by[place], lengths[place] = peer, max(len(buckets), lengths[place])
        if shares:  # peers that synchronise run equally many rounds
            every = share(comm.control, lengths)
            lengths = np.max([every[peer] for peer in self._near], axis=0)
        self._steps: list[tuple[tuple[int, Bucket] | None, tuple[int, Bucket] | None]] = []
        self._turns: list[range] = []
        for turn in range(turns):
            first = len(self._steps)
            for place in range(turn * steps, (turn + 1) * steps):
                to, source = to_by.get(place, -1), source_by.get(place, -1)
                sent, received = out.get((turn, to), ()), incoming.get((turn, source), ())
                self._steps += [
                    (
                        (to, sent[i]) if i < len(sent) else None,
                        (source, received[i]) if i < len(received) else None,
                    )
                    for i in range(int(lengths[place]))
                ]
            self._turns.append(range(first, len(self._steps)))
        self._set_aside(like)
        self._stream_bytes = NEAR_STREAM_BYTES if self._meets and not self._checksums else STREAM_FROM_BYTES
        self._packers: dict[tuple[int, bool], tuple[BoxCopy | None, list[list[Piece]]]] = {}
        words = (0 if step is None else 1 + len(step[1].pieces) for _, step in self._steps)
        self._words = list(accumulate(words, initial=0))
        self._differences = comm.xp.empty(self._words[-1], np.uint64)

    def _set_aside(self, like: Mover | None) -> None:
        """Make, or share, the send and receive buffers."""
        comm = self._comm
        out_bytes = max((self._size(out[1]) for out, _ in self._steps if out is not None), default=0)
        into_bytes = max(
            (self._size(c[1]) for _, c in self._steps if c is not None and c[0] not in self._near), default=0
        )
        self._meets = len(self._near) > 1 and bool(self._steps)
        fits = like is not None and like._fits(out_bytes, into_bytes, self._meets)
        if like is not None and all(row[0] for row in share(comm.control, np.array([fits], np.int64))):
            self._out, self._into, self._theirs = like._out, like._into, like._theirs
        else:
            with collective_step(comm, "reshard"):
                self._out, self._into = _staging_buffers(comm, out_bytes, into_bytes)
            if self._meets:
                with comm.turn("a reshard"):
                    self._theirs = comm.reach.publish(self._out or (None, None))
        self._round_messages = RoundMessages(
            comm, self._out, self._into,
            [self._messages(out) for out, _ in self._steps], [self._messages(incoming) for _, incoming in self._steps],
        )  # fmt: skip

    def _fits(self, out_bytes: int, into_bytes: int, meets: bool) -> bool:
        """Return whether its buffers are large enough, and visible to peers if needed."""
        out, into = (buffers[0].nbytes if buffers else 0 for buffers in (self._out, self._into))
        return out >= out_bytes and into >= into_bytes and (self._theirs is not None or not meets)

    def _messages(self, step: tuple[int, Bucket] | None) -> list[Message]:
        if step is None or step[0] in self._near:
            return []
        return [Message(step[0], 0, self._size(step[1]))]

    def _buckets(self, streams: Streams, sends: bool) -> dict[tuple[int, int], tuple[Bucket, ...]]:
        """Return the buckets by turn and peer."""
        found: dict[tuple[int, int], list[Item]] = {}
        for peer, items in streams.items():
            for item in items:
                found.setdefault((item.turn, peer), []).append(item)
        made = {}
        for (turn, peer), items in found.items():
            limit = self._near_bucket_bytes if peer in self._near else self._far_bucket_bytes
            made[turn, peer] = buckets_of(_parts(items, sends, limit), limit)
        return {key: buckets for key, buckets in made.items() if buckets}

    def _size(self, bucket: Bucket) -> int:
        if not self._checksums:
            return bucket.size_bytes
        return -(-bucket.size_bytes // 8) * 8 + 8 * (1 + len(bucket.pieces))

    # ---- moving

    def find_local(self) -> None:
        """Look up this rank's local copies, in parts that fit beside a round."""
        plain = [i for i in self._copies if not i.is_converted]
        total = sum(i.size_bytes for i in plain)
        parts = (Part(i, -1, shape_of(i.src_box), dtypes.get(i.dtype).itemsize_bytes) for i in plain)
        base = address(self._anchor)
        self._local: list[Callable[[], object]] = []
        for bucket in buckets_of(([part] for part in parts), NEAR_BUCKET_BYTES):
            sources = [inner_span(p.item.source_span(), p.box) for p in bucket.pieces]
            targets = [inner_span(p.item.target_span(), p.box) for p in bucket.pieces]
            copies = BoxCopy(sources, targets, base, base, result_bytes=total)
            self._local.append(partial(copies.run, self._anchor, self._anchor))
        if self._conversion is not None:
            self._local += [partial(self._conversion.copy, i) for i in self._copies if i.is_converted]

    def drop_sources(self) -> None:
        """Look up sources again, after their arrays changed."""
        self._packers = {key: found for key, found in self._packers.items() if not key[1]}
        self.find_local()

    def run(self, version: int, step: collective_step) -> None:
        """Move the arrays' present content; what fails on this rank is kept by the step, and the rounds go on."""
        reach, messages = self._comm.reach, self._round_messages
        self.version = version
        if self._has_run and self._unsettled:
            settle(self._unsettled)  # huge pages are read faster, which pays from the second run on
            self._unsettled = []
        self._has_run = True
        if self._reads:
            reach.barrier()  # all peers' sources are ready
            self._read(step)
        done = 0

        def fill(number: int) -> None:
            messages.make_room(number)
            out, _ = self._steps[number]
            if out is not None:
                step.attempt(self._pack, number, out[1], self._out[number & 1])
            messages.send(number)

        def meet(number: int) -> None:
            if self._meets:
                reach.barrier()

        def take(number: int) -> None:
            came = messages.take(number)
            _, coming = self._steps[number]
            if coming is not None:
                peer, bucket = coming
                slot = came[peer] if peer in came else self._slot_of(peer, number)
                step.attempt(self._unpack, number, peer, bucket, slot)

        def local(number: int) -> None:
            nonlocal done
            until = len(self._local) * (number + 1) // len(self._steps)
            for call in self._local[done:until]:
                step.attempt(call)
            done = until

        for turn in self._turns:  # forwarded items have arrived in an earlier turn
            run_rounds(turn, fill, meet, take, local)
        for call in self._local[done:]:
            step.attempt(call)
        messages.finish()
        if self._checksums and self._words[-1] and self._comm.xp is not np:
            step.attempt(self._check_differences)

    def count(self) -> None:
        """Count bytes moved through memory; messages are counted when sent."""
        if len(self._near) > 1 or self._comm.size == 1:
            self._comm.traffic.add("reshard", self._near_sent, self._near_received, self._near_received)

    def _slot_of(self, peer: int, number: int) -> Array:
        slot = self._slots.get((peer, number & 1))
        if slot is None:
            assert self._theirs is not None
            slot = self._slots[peer, number & 1] = self._theirs.view(peer, number & 1)
        return slot

    def _pack(self, number: int, bucket: Bucket, slot: Array) -> None:
        found = self._packers.get((number, True))
        if found is None:
            plain, rest = _sorted(bucket)
            spans = [inner_span(p.item.source_span(), p.box) for p in plain]
            copies = BoxCopy(spans, _packed(spans, plain), address(self._anchor), 0) if plain else None
            found = self._packers[number, True] = copies, rest
        copies, rest = found
        if copies is not None:
            copies.run(self._anchor, slot, len(slot) >= self._stream_bytes, fetching=True)
        for pieces in rest:
            self._conversion.put(pieces, slot)  # type: ignore[union-attr]
        if self._checksums:
            self._add_checksums(bucket, slot)

    def _unpack(self, number: int, peer: int, bucket: Bucket, slot: Array) -> None:
        if self._checksums:
            self._check_checksums(number, peer, bucket, slot)
        found = self._packers.get((number, False))
        if found is None:
            plain, rest = _sorted(bucket)
            spans = [inner_span(p.item.target_span(), p.box) for p in plain]
            copies = BoxCopy(_packed(spans, plain), spans, 0, address(self._anchor)) if plain else None
            found = self._packers[number, False] = copies, rest
        copies, rest = found
        if copies is not None:  # bypass the caches: all buckets together do not fit
            copies.run(slot, self._anchor, True)
        for pieces in rest:
            self._conversion.get(pieces, slot)  # type: ignore[union-attr]

    # ---- checksums

    def _sealed(self, bucket: Bucket, slot: Array) -> Array:
        """Return the words behind the pieces of a bucket: its version, and a checksum for each."""
        return slot[-(-bucket.size_bytes // 8) * 8 : self._size(bucket)].view(np.uint64)

    def _add_checksums(self, bucket: Bucket, slot: Array) -> None:
        seal(slot, bucket, self.version, self._sealed(bucket, slot))

    def _check_checksums(self, number: int, peer: int, bucket: Bucket, slot: Array) -> None:
        differences = self._differences[self._words[number] : self._words[number + 1]]
        seal(slot, bucket, self.version, differences, self._sealed(bucket, slot))
        if isinstance(differences, np.ndarray):  # those of a GPU are told at the end of the run, in one wait
            self._refuse(peer, bucket, differences)

    def _check_differences(self) -> None:
        found = self._comm._transport.to_host(self._differences)
        for first, (_, step) in zip(self._words, self._steps, strict=False):
            if step is not None:
                self._refuse(*step, found[first:])

    def _refuse(self, peer: int, bucket: Bucket, differences: Array) -> None:
        """Raise what differs of the version and the checksums of a bucket, if anything does."""
        me = self._comm.rank
        if differences[0]:
            came = (self.version - int(differences[0])) % (1 << 64)
            raise VerificationError(
                f"rank {peer} sent version {came} to rank {me}, which expects {self.version}"
            )
        for piece, difference in zip(bucket.pieces, differences[1:], strict=False):
            if difference:
                raise VerificationError(
                    f"{piece.item.name}: the checksum of a piece of {piece.size_bytes} bytes from rank {peer} to rank "
                    f"{me}, at {piece.item.dst_box}, does not agree: bits changed on the way"
                )


def bucket_sizes(comm: Communicator, by_memory: bool, staging_bytes: int) -> tuple[int, int]:
    """Return the most bytes of a bucket for readable peers, and of one for others; equal on all ranks."""
    alone = by_memory and comm.reach.whole
    far = max(256, staging_bytes // (2 if alone else 4) // 64 * 64)
    return min(max(256, NEAR_BUCKET_BYTES), far), far


def _staging_buffers(comm: Communicator, out_bytes: int, into_bytes: int) -> tuple[list[Array], list[Array]]:
    """Return two send buffers, visible to peers, and two receive buffers."""
    try:
        out = [comm.empty(out_bytes, "uint8") for _ in range(2)] if out_bytes else []
        into = [comm.xp.empty(into_bytes, np.uint8) for _ in range(2)] if into_bytes else []
    except (MemoryError, OSError) as error:
        raise CommError(
            f"there is no memory for buckets of {max(out_bytes, into_bytes)} bytes, two out and two in ({error}); give "
            "a smaller staging_bytes"
        ) from error
    return out, into


def _items(streams: Streams) -> list[Item]:
    return [item for items in streams.values() for item in items]


def _wire_bytes(forms: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(map(bytes_of, forms))


def _copy_between(pairs: Sequence[tuple[Item, Span]], src_base: int, dst_base: int) -> BoxCopy:
    targets = [item.target_span() for item, _ in pairs]
    return BoxCopy([span for _, span in pairs], targets, src_base, dst_base)


def _parts(items: Sequence[Item], sends: bool, limit_bytes: int) -> Iterator[Sequence[Part]]:
    """Yield the parts of items; both sides get the same, from the formats alone."""
    for item in items:
        forms = item.sent if sends else item.got
        if len(forms) == 1 and bytes_of(forms[0]) == item.size_bytes:
            yield [Part(item, -1, shape_of(item.src_box), dtypes.get(forms[0][0]).itemsize_bytes)]
        else:
            yield from bands_of(
                item, [shape for _, shape in forms], [bytes_of(f) for f in forms], limit_bytes
            )


def _sorted(bucket: Bucket) -> tuple[list[Piece], list[list[Piece]]]:
    """Return the pieces that are copied as they are, and groups of those that a transform converts."""
    plain = [p for p in bucket.pieces if not p.item.is_converted]
    return plain, together([p for p in bucket.pieces if p.item.is_converted])


def _packed(spans: Sequence[Span], pieces: Sequence[Piece]) -> list[Span]:
    return [packed_span(p.offset_bytes, s.extents, s.itemsize) for s, p in zip(spans, pieces, strict=True)]


# ---- checksums


# Each word of 64 bits is mixed with its place by steps that can be undone (add, xor with a shift of itself, multiply by
# an odd number), and the results are added up. So whatever changes within one word shows, always: a sum of which one
# term differs differs. What changes in several words, or changes places, shows but for one case in 2^64. The steps are
# those that hash functions end with (A. Appleby, MurmurHash3, fmix64; G. Steele et al., "Fast splittable pseudorandom
# number generators", OOPSLA 2014).


def checksum(buffer: Array) -> int:
    """Return the checksum of the bytes of an array of the host; it is C-contiguous."""
    raw = buffer.reshape(-1).view(np.uint8)
    if raw.ctypes.data % 8:
        raw = raw.copy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    tail = int.from_bytes(raw[words.size * 8 :].tobytes(), "little")
    ends = _mixed(tail, words.size) + _mixed(raw.size, words.size + 1)
    return (int(sums()(words)) + ends) & _MASK


def seal(slot: Array, bucket: Bucket, version: int, sums: Array, expected: Array | None = None) -> None:
    """Write a version and the checksums of a bucket's pieces, uint64, less what is expected. No GPU is waited for."""
    if not isinstance(slot, np.ndarray):
        cast(CudaEngine, engine_for(slot)).checksum(slot, sums, expected, bucket.runs, version)
        return
    parts = (slot[p.offset_bytes : p.offset_bytes + p.size_bytes] for p in bucket.pieces)
    sums[:] = np.array([version, *map(checksum, parts)], np.uint64)
    sums -= np.uint64(0) if expected is None else expected


def _mixed(word: int, place: int) -> int:
    word = (word + (place + 1) * _STEP) & _MASK
    word = (word ^ word >> _FIRST_SHIFT) * _FACTOR & _MASK
    return word ^ word >> _LAST_SHIFT


@cache
def sums() -> Any:
    """Return the compiled function, or the plain one where Numba is missing."""
    try:
        from lowshard.compiled import Signature, digest_of, load_native

        name = f"mixed_sum_{digest_of([Path(__file__)])}"
        call = load_native(name, lambda: reshard_mixed_sum, Signature(("uint64[1]",), "uint64")).call
    except ImportError:
        return _plain
    return lambda words: call(words.__array_interface__["data"][0], words.size)


def reshard_mixed_sum(words: Any) -> Any:
    """Return the sum of all words, each mixed with its place."""
    step, factor = np.uint64(_STEP), np.uint64(_FACTOR)
    first, last = np.uint64(_FIRST_SHIFT), np.uint64(_LAST_SHIFT)
    total, place = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        place = place + step
        word = words[i] + place
        word = (word ^ (word >> first)) * factor
        total = total + (word ^ (word >> last))
    return total


def _plain(words: Any) -> int:
    places = np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_STEP)
    mixed = words + places
    mixed = (mixed ^ mixed >> np.uint64(_FIRST_SHIFT)) * np.uint64(_FACTOR)
    return int((mixed ^ mixed >> np.uint64(_LAST_SHIFT)).sum(dtype=np.uint64))
