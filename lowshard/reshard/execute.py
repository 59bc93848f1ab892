"""Runs a reshard plan: what stays is copied, what neighbours show is read where it lies, the rest goes in buckets.

Memory beside the arrays is bounded: two buckets out and two in. Ranks send and receive at once, each to the k-th
after it and from the k-th before it, for k = 1, 2, ...: every rank is in one pair each way at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, shape_of, volume
from lowshard.comm.agreement import agree, share
from lowshard.comm.protocol import Communicator
from lowshard.errors import BufferMismatchError, LowshardError, MeshError, MismatchError, VerificationError
from lowshard.kernels import cast
from lowshard.kernels.buffer import address
from lowshard.reshard.channel import Channel, MessageChannel, NodeView, SlotChannel
from lowshard.reshard.checksum import checksum
from lowshard.reshard.plan import Entry, Move, RankPlan, ReshardPlan
from lowshard.reshard.transform import ReshardTransform, ensure_sendable
from lowshard.reshard.wire import Bucket, Copier, Packer, Piece, Span, buckets_of, packed_span, span_of

Array = Any
_Key = tuple[int, Box, bool]
Way = Literal["auto", "direct", "slots", "messages"]

STAGING_BYTES = 16 << 20
"""Memory for buckets on each rank, by default."""
_DIRECT, _SLOTS, _MESSAGES = "direct", "slots", "messages"


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank moved in a run."""

    sent_bytes: int
    """Payload given to others."""
    received_bytes: int
    copied_bytes: int
    """Payload that stayed on the rank."""
    buckets: int
    """Messages sent."""
    staging_bytes: int
    """Memory that was set aside for buckets."""


class Reshard:
    """A plan made ready for given arrays: addresses looked up, buckets laid out, staging set aside.

    `run` moves the arrays' present content, as often as you like. Collective: all ranks of the communicator make it,
    run it and close it together.

    Args:
        plan: equal on every rank (its digest is compared).
        src: this rank's source arrays by their names on this rank; what the plan does not take is left alone. A
            quantised tensor (data and scale) is taken for what it stands for. None on a rank without any.
        dst: its destination arrays, likewise; what a transform stores needs none.
        comm: a communicator that has every rank of the plan; others take part with nothing.
        transform: what this rank's tensors go through; the other ranks may have another one, or none.
        staging_bytes: bound on the memory for buckets.
        checksums: send a checksum with every piece and compare.
        way: "direct" reads sources where neighbours show them (loopback, or arrays of `comm.empty` on one node) and
            takes "slots" for others; "slots" unpacks out of memory the sender packed into; "messages" sends
            buckets. "auto" takes the first that works on all ranks.
        like: another one over the same communicator and settings, whose staging is used: the two never run at once.

    Raises:
        BufferMismatchError: an array is missing, or has another shape, dtype or memory order than the plan says.
        MeshError: the communicator lacks ranks of the plan.
        MismatchError: ranks hold different plans or settings, or two sides of a move prepare unequal arrays.
        PlanError: sources do not cover what is needed.
        (Each on every rank, whichever is at fault, before anything is written.)
    """

    def __init__(
        self,
        plan: ReshardPlan,
        src: Mapping[str, Any] | None,
        dst: Mapping[str, Any] | None,
        comm: Communicator,
        transform: ReshardTransform | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        checksums: bool = False,
        way: Way = "auto",
        like: Reshard | None = None,
    ) -> None:
        self._like = like
        self._just_made = False
        self.plan, self.comm, self.transform = plan, comm, transform
        self.checksums, self.version = checksums, 0
        self._src: dict[int, Array] = {}
        self._dst: dict[int, Array] = {}
        self._given = (src or {}, dst or {})
        self._mine = RankPlan(comm.rank, {}, {}, ())
        self._error: LowshardError | None = None
        self._bucket_bytes = max(256, staging_bytes // 4 // 64 * 64)
        try:
            self._prepare()
        except LowshardError as error:
            self._error = error
        settings = f"{plan.digest()} {self._bucket_bytes} {checksums} {way}"
        settings = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
        agree(comm, bytes.fromhex(settings), self._take_error(), "execute_reshard_plan")
        self._shake_hands()
        view = NodeView.of(comm) if way != _MESSAGES and comm.xp is np else None
        if view is None and way in (_DIRECT, _SLOTS):
            agree(
                comm,
                b"",
                MismatchError(
                    f"way {way!r} needs ranks that see each other's memory, which {comm.transport} has not"
                ),
                "execute_reshard_plan",
            )
        self._lay_out(view, way)

    # ---- running

    def run(self, version: int = 0) -> Report:
        """Move what the source arrays hold now. Collective.

        Args:
            version: travels with the checksums; a bucket of another version is an error.

        Raises:
            VerificationError: a checksum does not agree; the text names tensor and sender. The others as the
                transform raises them. (Each on every rank; destination arrays are undefined then.)
            PeerFailed: a rank failed or died.
        """
        self.version = version
        self._error = None
        if not self._just_made:  # what was prepared to learn its form is of an earlier content
            self._kept.clear()
            self._pending.clear()
            self._rooms.clear()
        self._just_made = False
        self._half.clear()
        self._left.clear()
        for entry in self._quantised:
            self._refresh(entry)
        if self.transform is not None:
            self._guard(self.transform.begin)
        if self._direct is not None:
            self.comm._barrier()  # the sources of all ranks are as they shall be
        self._local.run()
        for move in self._local_transformed:
            self._guard(self._copy_transformed, move)
        if self._direct is not None:
            self._direct.run()
        if self._channel is not None:
            self._stream(self._channel)
        if self.transform is not None and self._error is None:
            self._guard(self.transform.end)
        agree(self.comm, b"", self._take_error(), "reshard")
        report = self.report
        if not isinstance(self._channel, MessageChannel):  # messages are counted as they are sent
            self.comm.traffic.add("reshard", report.sent_bytes, report.received_bytes)
        return report

    def close(self) -> None:
        """Let go of arrays and staging. Closing twice is safe."""
        self._channel = None
        self._src, self._dst, self._given = {}, {}, ({}, {})
        self._packers.clear()

    def _guard(self, call: Any, *args: Any) -> Any:
        """Run what may raise on this rank alone; the others must not wait for it in vain."""
        try:
            return call(*args)
        except Exception as error:
            if self._error is None:
                self._error = (
                    error
                    if isinstance(error, LowshardError)
                    else VerificationError(f"{type(error).__name__}: {error}")
                )
                self._error.__cause__ = None if error is self._error else error
            return None

    def _take_error(self) -> LowshardError | None:
        error, self._error = self._error, None
        return error

    # ---- making ready

    def _prepare(self) -> None:
        comm, plan = self.comm, self.plan
        self._quantised: list[int] = []
        if comm.size < plan.world_size:
            raise MeshError(
                f"the plan has ranks up to {plan.world_size - 1}, the communicator {comm.size} ranks; start "
                f"{plan.world_size}"
            )
        self._mine = plan.for_rank(comm.rank)
        sending = {m.entry for m in self._mine.copies}
        sending |= {m.entry for found in self._mine.sends.values() for m in found if not self._handed(m)}
        for entry in sorted(sending):
            self._refresh(entry)
        handed = {m.entry for found in self._mine.sends.values() for m in found if self._handed(m)}
        for number, entry in enumerate(plan.entries):
            if comm.rank not in entry.dst:
                continue
            name = entry.dst_local_name(comm.rank)
            if self._transforms(name):
                if number in handed:
                    raise MismatchError(
                        f"{name}: a multicast plan hands arrays on, and a transform stores none"
                    )
                continue
            self._dst[number] = self._array(1, name, entry, entry.dst.local_shape(comm.rank))

    def _refresh(self, entry: int) -> None:
        """Look up a source array; one that is quantised is taken anew."""
        e = self.plan.entries[entry]
        name = e.src_local_name(self.comm.rank)
        self._src[entry] = self._array(0, name, e, e.src.local_shape(self.comm.rank))
        if self._src[entry] is not self._given[0].get(name) and entry not in self._quantised:
            self._quantised.append(entry)

    def _array(self, side: int, name: str, entry: Entry, shape: tuple[int, ...] | None) -> Array:
        which = "destination" if side else "source"
        given = self._given[side].get(name)
        if given is None:
            raise BufferMismatchError(
                f"{name}: rank {self.comm.rank} has a part of this {which} tensor, but no such array was given"
            )
        layout = entry.dst if side else entry.src
        row = dtypes.get(layout.dtype)
        array = given if side else ensure_sendable(given, row.name)
        xp = self.comm.xp
        eight = row.bits == 8 and xp is not np
        if not isinstance(array, xp.ndarray):
            raise BufferMismatchError(f"{name}: {which} is a {xp.__name__} array, got {type(array).__name__}")
        got = dtypes.get(array.dtype).name
        if tuple(array.shape) != shape or not (got == row.name or (eight and got == "uint8")):
            raise BufferMismatchError(
                f"{name}: rank {self.comm.rank} holds {row.name}{list(shape or ())} of this {which} tensor by the plan, got "
                f"{got}{list(array.shape)}"
            )
        if side and xp is np and not array.flags.writeable:
            raise BufferMismatchError(f"{name}: the destination is written to, but the array is read-only")
        return array

    def _transforms(self, name: str) -> bool:
        return self.transform is not None and self.transform.should_transform(name)

    def _handed(self, move: Move) -> bool:
        """Say whether a move's source is a destination array: multicast hands on."""
        if not self.plan.multicast:
            return False
        entry = self.plan.entries[move.entry]
        return move.src_rank not in entry.src and move.src_rank in entry.dst

    def _source(self, move: Move) -> Array:
        return (self._dst if self._handed(move) else self._src)[move.entry]

    # ---- formats: what travels for a move

    def _send_format(self, move: Move) -> list[tuple[str, tuple[int, ...]]]:
        entry = self.plan.entries[move.entry]
        name = entry.src_local_name(move.src_rank)
        if self._handed(move) or not self._transforms(name):
            return [(entry.src.dtype, shape_of(move.src_box))]
        assert self.transform is not None
        refused = self.transform.check_refuses(name, move.dst_box)
        if refused:
            raise MismatchError(refused)
        if self.transform.travels_plain(name, move.dst_box):
            return [(entry.src.dtype, shape_of(move.src_box))]
        known = self.transform.send_format(name, move.src_box, entry.src.dtype)
        if known is None:
            known = [(dtypes.get(a.dtype).name, tuple(a.shape)) for a in self._prepared(move)]
        return known

    def _recv_format(self, move: Move) -> list[tuple[str, tuple[int, ...]]]:
        entry = self.plan.entries[move.entry]
        name = entry.dst_local_name(move.dst_rank)
        plain = [(entry.src.dtype, shape_of(move.dst_box))]
        if not self._transforms(name):
            return plain
        assert self.transform is not None
        refused = self.transform.check_refuses(name, move.dst_box)
        if refused:
            raise MismatchError(refused)
        if self.transform.travels_plain(name, move.dst_box):
            return plain
        known = self.transform.recv_format(name, move.dst_box, entry.src.dtype)
        if known is None:
            self._rooms[move.id] = self.transform.prepare_recv(name, _slices(move.dst_box))
            known = [(dtypes.get(a.dtype).name, tuple(a.shape)) for a in self._rooms[move.id]]
        return known

    def _shake_hands(self) -> None:
        """Compare what each pair of ranks will move: how many arrays, of what dtypes and shapes."""
        comm = self.comm
        self._kept: dict[_Key, list[Array]] = {}
        self._pending: dict[_Key, int] = {}
        self._rooms: dict[int, list[Array]] = {}
        self._uses: dict[_Key, int] = {}
        for found in (*self._mine.sends.values(), self._mine.copies):
            for m in found:
                key = _reuse_key(m)
                self._uses[key] = self._uses.get(key, 0) + 1
        self._formats: dict[tuple[int, bool], list[tuple[str, tuple[int, ...]]]] = {}
        mine, theirs = np.zeros((2, comm.size, 3), np.int64)
        sides = ((mine, self._mine.sends, True), (theirs, self._mine.receives, False))
        for table, side, is_send in sides:
            for peer, peers_moves in side.items():
                table[peer] = self._guard(self._summary, peers_moves, is_send) or 0
        counts, displs = [3] * comm.size, [3 * i for i in range(comm.size)]
        said = np.zeros_like(mine)
        control = comm.control
        send, recv = control.xp.asarray(mine.reshape(-1)), control.xp.asarray(said.reshape(-1))
        control._all_to_all_v(send, counts, displs, recv, counts, displs)
        said = (recv if isinstance(recv, np.ndarray) else recv.get()).reshape(comm.size, 3)
        for peer in range(comm.size):
            if self._error is None and (said[peer] != theirs[peer]).any():
                self._error = MismatchError(
                    f"rank {peer} sends {said[peer][0]} arrays for {said[peer][1]} boxes to rank {comm.rank}, which makes "
                    f"room for {theirs[peer][0]} arrays for {theirs[peer][1]} boxes: prepare_send and prepare_recv give the "
                    "same number of arrays of the same dtypes and shapes; use one kind of transform on both sides, or "
                    "none on the sender for a receiver that takes what is sent as it is"
                )
        for move in self._mine.copies:
            if self._error is None:
                self._guard(self._check_copy, move)
        agree(comm, b"", self._take_error(), "execute_reshard_plan")

    def _check_copy(self, move: Move) -> None:
        send, recv = self._send_format(move), self._recv_format(move)
        self._formats[move.id, True] = send
        if [_nbytes(f) for f in send] != [_nbytes(f) for f in recv]:
            raise MismatchError(
                f"{self.plan.entries[move.entry].name}: rank {move.src_rank} prepares {send} to send itself and {recv} to "
                "receive; prepare_send and prepare_recv give the same"
            )

    def _summary(self, found: Sequence[Move], is_send: bool) -> tuple[int, int, int]:
        digest, arrays = hashlib.blake2b(digest_size=7), 0
        for move in found:
            formats = self._send_format(move) if is_send else self._recv_format(move)
            self._formats[move.id, is_send] = formats
            arrays += len(formats)
            digest.update(f"{move.id} {formats}".encode())
        return arrays, len(found), int.from_bytes(digest.digest(), "little")

    # ---- laying out

    def _lay_out(self, view: NodeView | None, way: Way) -> None:
        comm = self.comm
        anchor = comm.xp.zeros(64, np.uint8)
        self._anchor = anchor
        self._local_transformed = [m for m in self._mine.copies if self._is_prepared(m)]
        plain = [m for m in self._mine.copies if not self._is_prepared(m)]
        self._local = Copier(
            [span_of(self._src[m.entry], m.src_box) for m in plain],
            [span_of(self._dst[m.entry], m.dst_box) for m in plain],
            anchor,
        )
        self._direct: Copier | None = None
        seen = self._see_sources(view) if view is not None and way in ("auto", _DIRECT) else {}
        direct: list[tuple[Move, Span]] = []
        streams_in: dict[int, list[Move]] = {}
        for peer, found in self._mine.receives.items():
            for m in found:
                span = None if self._is_prepared(m) or self.checksums else self._seen_span(seen.get(peer), m)
                if span is None:
                    streams_in.setdefault(peer, []).append(m)
                else:
                    direct.append((m, span))
        streams_out = self._ask_which(streams_in, seen) if view is not None else self._mine.sends
        if seen:
            self._direct = Copier(
                [span for _, span in direct],
                [span_of(self._dst[m.entry], m.dst_box) for m, _ in direct],
                anchor,
            )
        self._seen = seen
        self._out = self._buckets(streams_out, True)
        self._in = self._buckets(streams_in, False)
        busy = np.array([bool(self._out or self._in)], np.uint8)
        any_busy = any(bool(row[0]) for row in share(comm.control, busy))
        room = self._bucket_bytes + (8 * (2 + self._most_pieces()) if self.checksums else 0)
        if self.checksums:  # both sides of a slot need the same room: take the largest
            room = int(max(row[0] for row in share(comm.control, np.array([room], np.int64))))
        self._channel: Channel | None = None
        if any_busy:
            self._channel = SlotChannel(comm, room, view) if view is not None else MessageChannel(comm, room)
        self._packers: dict[tuple[int, int, int, bool], Packer] = {}
        self._half: dict[int, tuple[list[Array], list[Array]]] = {}
        self._left: dict[int, int] = {}
        sent = sum(self._wire_bytes(m, True) for found in self._mine.sends.values() for m in found)
        received = sum(self._wire_bytes(m, False) for found in self._mine.receives.values() for m in found)
        self.report = Report(
            sent,
            received,
            sum(self.plan.move_bytes(m) for m in self._mine.copies),
            sum(map(len, self._out.values())),
            0 if self._channel is None else (2 if isinstance(self._channel, SlotChannel) else 4) * room,
        )

    def _buckets(
        self, streams: Mapping[int, Sequence[Move]], is_send: bool
    ) -> dict[tuple[int, int], tuple[Bucket, ...]]:
        """Return the buckets by stage and peer: what is handed on waits until it has come."""
        found: dict[tuple[int, int], list[Move]] = {}
        for peer, moves in streams.items():
            for m in moves:
                found.setdefault((self._stage(m), peer), []).append(m)
        return {
            key: buckets_of(self._parts(moves, is_send), self._bucket_bytes) for key, moves in found.items()
        }

    def _stage(self, move: Move) -> int:
        if not self._handed(move):
            return 0
        seat = self.plan.entries[move.entry].dst.seats.seat(move.dst_rank)
        return 0 if seat is None else seat[1].bit_length()

    def _most_pieces(self) -> int:
        return max(
            (len(b.pieces) for found in (*self._out.values(), *self._in.values()) for b in found), default=0
        )

    def _is_prepared(self, move: Move) -> bool:
        """Say whether a move goes through a transform on this rank, so that it has arrays of its own."""
        entry = self.plan.entries[move.entry]
        rank = self.comm.rank
        sends = move.src_rank == rank and self._transforms(entry.src_local_name(rank))
        takes = move.dst_rank == rank and self._transforms(entry.dst_local_name(rank))
        return (sends and not self._handed(move)) or takes

    def _see_sources(self, view: NodeView) -> dict[int, dict[int, Array]]:
        """Return, by rank and tensor, the source arrays that this process sees."""
        comm, plan = self.comm, self.plan
        numbers = [n for n, e in enumerate(plan.entries) if comm.rank in e.src]
        arrays = []
        for n in numbers:
            array = self._src.get(n)
            shown = (
                array is not None
                and n not in self._quantised
                and array.flags.c_contiguous
                and not self._transforms(plan.entries[n].src_local_name(comm.rank))
            )
            arrays.append(array if shown else None)
        found: dict[int, dict[int, Array]] = {}
        for rank, theirs in enumerate(view.publish(arrays)):
            held = [n for n, e in enumerate(plan.entries) if rank in e.src]
            found[rank] = {n: a for n, a in zip(held, theirs, strict=True) if a is not None}
        return found

    def _seen_span(self, theirs: Mapping[int, Array] | None, move: Move) -> Span | None:
        array = None if theirs is None else theirs.get(move.entry)
        if array is None or self._handed(move):
            return None
        entry = self.plan.entries[move.entry]
        shape = entry.src.local_shape(move.src_rank)
        assert shape is not None
        whole = packed_span(address(array), shape, entry.src.itemsize_bytes)
        at = whole.at + sum(s * b[0] for s, b in zip(whole.strides, move.src_box, strict=True))
        return Span(at, whole.strides, shape_of(move.src_box), whole.itemsize)

    def _ask_which(
        self, streams_in: Mapping[int, list[Move]], seen: Mapping[int, object]
    ) -> Mapping[int, Sequence[Move]]:
        """Learn which of this rank's moves the receivers do not read for themselves."""
        if not seen:
            return self._mine.sends
        comm = self.comm
        counts_out = [len(self._mine.sends.get(p, ())) for p in range(comm.size)]
        counts_in = [len(self._mine.receives.get(p, ())) for p in range(comm.size)]
        wanted = np.zeros(sum(counts_in), np.uint8)
        displs_in = _displs(counts_in)
        for peer, found in self._mine.receives.items():
            streamed = {m.id for m in streams_in.get(peer, ())}
            for i, m in enumerate(found):
                wanted[displs_in[peer] + i] = m.id in streamed
        asked = np.zeros(sum(counts_out), np.uint8)
        displs_out = _displs(counts_out)
        comm._all_to_all_v(wanted, counts_in, displs_in, asked, counts_out, displs_out)
        found_out: dict[int, list[Move]] = {}
        for peer, moves in self._mine.sends.items():
            mine = [m for i, m in enumerate(moves) if asked[displs_out[peer] + i]]
            if mine:
                found_out[peer] = mine
        return found_out

    def _parts(self, found: Sequence[Move], is_send: bool) -> list[tuple[Move, int, tuple[int, ...], int]]:
        """Return what travels for moves; both sides must come to the same pieces, so all of it rests on formats."""
        parts: list[tuple[Move, int, tuple[int, ...], int]] = []
        for move in found:
            formats = self._formats[move.id, is_send]
            if len(formats) == 1 and _nbytes(formats[0]) == self.plan.move_bytes(move):
                itemsize = dtypes.get(formats[0][0]).itemsize_bytes
                parts.append((move, -1, shape_of(move.src_box), itemsize))
                continue
            parts.extend((move, c, (_nbytes(f),), 1) for c, f in enumerate(formats))
        return parts

    def _wire_bytes(self, move: Move, is_send: bool) -> int:
        return sum(_nbytes(f) for f in self._formats[move.id, is_send])

    # ---- the stream

    def _stream(self, channel: Channel) -> None:
        comm = self.comm
        steps = {(stage, (peer - comm.rank) % comm.size) for stage, peer in self._out}
        steps |= {(stage, (comm.rank - peer) % comm.size) for stage, peer in self._in}
        for stage, step in sorted(steps):
            to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            out, coming = self._out.get((stage, to), ()), self._in.get((stage, source), ())
            for bucket in coming[:2]:
                channel.expect(source, self._size(bucket))
            for i in range(max(len(out), len(coming))):
                if i < len(out):
                    slot = channel.acquire()
                    self._guard(self._pack, (stage, to, i), out[i], slot)
                    channel.post(to, self._size(out[i]))
                if i < len(coming):
                    slot = channel.take(source)
                    self._guard(self._unpack, (stage, source, i), coming[i], slot)
                    channel.release(source)
                    if i + 2 < len(coming):
                        channel.expect(source, self._size(coming[i + 2]))
        channel.finish()

    def _size(self, bucket: Bucket) -> int:
        if not self.checksums:
            return bucket.size_bytes
        return -(-bucket.size_bytes // 8) * 8 + 8 * (1 + len(bucket.pieces))

    def _pack(self, place: tuple[int, int, int], bucket: Bucket, slot: Array) -> None:
        plain, prepared = self._sorted(bucket)
        key = (*place, True)
        packer = self._packers.get(key)
        if packer is None or any(p.move.entry in self._quantised for p in plain):
            spans = [_inner(span_of(self._source(p.move), p.move.src_box), p.box) for p in plain]
            packer = Packer(spans, [p.offset_bytes for p in plain], self._anchor)
            self._packers[key] = packer
        packer.pack(slot)
        for piece in prepared:
            arrays = self._prepared(piece.move)
            raw = arrays[max(piece.component, 0)].reshape(-1).view(np.uint8)
            begin, end = self._byte_range(piece)
            slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes] = raw[begin:end]
            if (end == raw.size and piece.component == len(arrays) - 1) or (
                piece.component < 0 and end == raw.size
            ):
                self._sent(piece.move)
        if self.checksums:
            self._seal(bucket, slot)

    def _unpack(self, place: tuple[int, int, int], bucket: Bucket, slot: Array) -> None:
        if self.checksums:
            self._check_seal(place[1], bucket, slot)
        plain, prepared = self._sorted(bucket)
        key = (*place, False)
        packer = self._packers.get(key)
        if packer is None:
            spans = [_inner(span_of(self._dst[p.move.entry], p.move.dst_box), p.box) for p in plain]
            packer = self._packers[key] = Packer(spans, [p.offset_bytes for p in plain], self._anchor)
        packer.unpack(slot)
        for piece in prepared:
            held = self._half.get(piece.move.id)
            if held is None:
                wanted = self._take_room(piece.move)
                forms = self._formats[piece.move.id, False]
                arrays = [
                    w if w.nbytes == _nbytes(f) else self.comm.xp.empty(f[1], dtypes.get(f[0]).numpy)
                    for w, f in zip(wanted, forms, strict=True)
                ]
                self._half[piece.move.id] = wanted, arrays
                self._left[piece.move.id] = sum(a.nbytes for a in arrays)
            else:
                wanted, arrays = held
            raw = arrays[max(piece.component, 0)].reshape(-1).view(np.uint8)
            begin, end = self._byte_range(piece)
            raw[begin:end] = slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
            self._left[piece.move.id] -= piece.size_bytes
            if not self._left[piece.move.id]:
                del self._left[piece.move.id]
                del self._half[piece.move.id]
                self._finalize(piece.move, wanted, arrays)

    def _sorted(self, bucket: Bucket) -> tuple[list[Piece], list[Piece]]:
        plain, prepared = [], []
        for piece in bucket.pieces:
            (prepared if self._is_prepared(piece.move) else plain).append(piece)
        return plain, prepared

    def _byte_range(self, piece: Piece) -> tuple[int, int]:
        """Return where a piece of a prepared array begins and ends; such arrays are contiguous, and so are pieces."""
        if piece.component >= 0:
            return piece.box[0]
        shape = shape_of(piece.move.src_box)
        itemsize = self.plan.entries[piece.move.entry].src.itemsize_bytes
        at, stride = 0, itemsize
        for n, (start, _) in zip(reversed(shape), reversed(piece.box), strict=True):
            at += start * stride
            stride *= n
        return at, at + piece.size_bytes

    # ---- transforms

    def _prepared(self, move: Move) -> list[Array]:
        """Return what this rank sends for a move; made once for all who get the same."""
        key = _reuse_key(move)
        found = self._kept.get(key)
        if found is None:
            entry = self.plan.entries[move.entry]
            name, source = entry.src_local_name(move.src_rank), self._source(move)
            assert self.transform is not None
            if not self._transforms(name) or self.transform.travels_plain(name, move.dst_box):
                part = source[_slices(move.src_box)]
                found = [part if part.flags.c_contiguous else part.copy()]
            else:
                found = self.transform.prepare_send(name, _slices(move.src_box), source)
                found = [a if a.flags.c_contiguous else a.copy() for a in found]
            self._kept[key] = found
            self._pending[key] = self._uses.get(key, 1)
        return found

    def _sent(self, move: Move) -> None:
        key = _reuse_key(move)
        self._pending[key] = self._pending.get(key, 1) - 1
        if self._pending[key] <= 0:
            self._kept.pop(key, None)
            self._pending.pop(key, None)

    def _take_room(self, move: Move) -> list[Array]:
        """Return the arrays that the transform wants filled for a move."""
        found = self._rooms.pop(move.id, None)
        if found is not None:
            return found
        assert self.transform is not None
        name = self.plan.entries[move.entry].dst_local_name(move.dst_rank)
        return self.transform.prepare_recv(name, _slices(move.dst_box))

    def _finalize(self, move: Move, wanted: list[Array], came: list[Array]) -> None:
        """Give the transform what came; where it wants another dtype than was sent, converted."""
        name = self.plan.entries[move.entry].dst_local_name(move.dst_rank)
        assert self.transform is not None
        if len(wanted) != len(came):
            raise MismatchError(
                f"{name}: prepare_recv makes room for {len(wanted)} arrays, {len(came)} are sent for {move.dst_box}"
            )
        for want, have in zip(wanted, came, strict=True):
            if want is have:
                continue
            if want.dtype != have.dtype:
                cast(have.reshape(want.shape), want.dtype, want)
            else:
                want[...] = have.reshape(want.shape)
        self.transform.finalize_recv(name, _slices(move.dst_box), wanted)

    def _copy_transformed(self, move: Move) -> None:
        """Do a move within this rank that a transform takes part in."""
        entry = self.plan.entries[move.entry]
        if self._transforms(entry.src_local_name(move.src_rank)):
            came = self._prepared(move)
            self._sent(move)
        else:
            came = [self._source(move)[_slices(move.src_box)]]
        if self._transforms(entry.dst_local_name(move.dst_rank)):
            plain = len(came) == 1 and came[0].flags.c_contiguous
            wanted = self._take_room(move)
            self._finalize(move, wanted, came if plain or len(came) > 1 else [came[0].copy()])
            return
        self._dst[move.entry][_slices(move.dst_box)] = came[0].reshape(shape_of(move.dst_box))

    # ---- checksums

    def _seal(self, bucket: Bucket, slot: Array) -> None:
        at = -(-bucket.size_bytes // 8) * 8
        words = [self.version]
        words += [checksum(slot[p.offset_bytes : p.offset_bytes + p.size_bytes]) for p in bucket.pieces]
        sealed = np.array(words, np.uint64).view(np.uint8)
        slot[at : at + sealed.size] = self.comm.xp.asarray(sealed)

    def _check_seal(self, peer: int, bucket: Bucket, slot: Array) -> None:
        at = -(-bucket.size_bytes // 8) * 8
        raw = slot[at : at + 8 * (1 + len(bucket.pieces))]
        raw = raw if isinstance(raw, np.ndarray) else raw.get()
        words = raw.copy().view(np.uint64).tolist()
        if words[0] != self.version:
            raise VerificationError(
                f"rank {peer} sent version {words[0]} to rank {self.comm.rank}, which expects {self.version}"
            )
        for piece, word in zip(bucket.pieces, words[1:], strict=True):
            if checksum(slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]) != word:
                name = self.plan.entries[piece.move.entry].name
                raise VerificationError(
                    f"{name}: the checksum of a piece of {piece.size_bytes} bytes from rank {peer} to rank "
                    f"{self.comm.rank}, at {piece.move.dst_box}, does not agree: bits changed on the way"
                )


def execute_reshard_plan(
    plan: ReshardPlan,
    src: Mapping[str, Any] | None,
    dst: Mapping[str, Any] | None,
    comm: Communicator,
    transform: ReshardTransform | None = None,
    *,
    staging_bytes: int = STAGING_BYTES,
    checksums: bool = False,
    way: Way = "auto",
) -> Report:
    """Move tensors as a plan says, from the arrays of `src` into those of `dst`.

    Collective: all ranks of the communicator call this. Arguments and errors: as for `Reshard`, which keeps what is
    made ready for another run.
    """
    made = Reshard(plan, src, dst, comm, transform, staging_bytes=staging_bytes, checksums=checksums, way=way)
    try:
        made._just_made = True
        return made.run()
    finally:
        made.close()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _inner(span: Span, box: Box) -> Span:
    at = span.at + sum(s * b[0] for s, b in zip(span.strides, box, strict=True))
    return Span(at, span.strides, shape_of(box), span.itemsize)


def _nbytes(form: tuple[str, tuple[int, ...]]) -> int:
    return prod(form[1]) * dtypes.get(form[0]).itemsize_bytes


def _reuse_key(move: Move) -> _Key:
    """Return what is equal for moves that carry the same: replicas of a destination get one preparation."""
    return move.entry, move.src_box, bool(move.dst_box) and any(end % 32 for end in move.dst_box[-1])


def _displs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


__all__ = ["Report", "Reshard", "execute_reshard_plan", "volume"]
