"""Buckets packed, sent and unpacked: out to one rank and in from another at a time, step after step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, shape_of
from lowshard.errors import VerificationError
from lowshard.kernels.staging import assign
from lowshard.reshard.bucket_channel import Channel
from lowshard.reshard.buckets import Bucket, Packer, Part, Piece, bands_of, buckets_of, inner_span, span_of
from lowshard.reshard.piece_checksum import checksum
from lowshard.reshard.rank_side import Format, Side, bytes_of, slices_of
from lowshard.reshard.reshard_plan import Move
from lowshard.reshard.write_choice import TRIAL_BYTES, WriteChoice

Array = Any
Stage = tuple[int, int]
"""Stage and peer. What is handed on goes in a later stage than what it came in."""


class BucketStream(Side):
    """The buckets of a rank."""

    checksums: bool
    version: int
    _bucket_bytes: int
    _anchor: Array
    _out: dict[Stage, tuple[Bucket, ...]]
    _in: dict[Stage, tuple[Bucket, ...]]
    _senders: list[int]
    """All ranks that send, and all that receive; ascending, the same on all ranks."""
    _receivers: list[int]
    _choice: WriteChoice | None
    """Of how buckets are written, where others read them out of shared memory."""
    _packers: dict[tuple[int, int, int, bool], tuple[Packer, list[list[Piece]]]]
    """Of each bucket, out and in: what is copied as it is, and the pieces that a transform makes or takes."""
    _steps: deque[Callable[[], object]]
    """What this rank has to do by itself, in small parts: it does it where it would wait for others."""
    _half: dict[int, tuple[list[Array], list[Array]]]
    _left: dict[int, int]

    # ---- what goes in which bucket

    def _buckets(
        self, streams: Mapping[int, Sequence[Move]], is_send: bool
    ) -> dict[Stage, tuple[Bucket, ...]]:
        """Return the buckets by stage and peer: what is handed on waits until it has come."""
        found: dict[Stage, list[Move]] = {}
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

    def _parts(self, found: Sequence[Move], is_send: bool) -> Iterator[Sequence[Part]]:
        """Yield what travels for moves; both sides must come to the same pieces, so all of it rests on formats."""
        for move in found:
            formats = self._formats[move.id, is_send]
            if len(formats) == 1 and bytes_of(formats[0]) == self.plan.move_bytes(move):
                itemsize = dtypes.get(formats[0][0]).itemsize_bytes
                yield [Part(move, -1, shape_of(move.src_box), itemsize)]
                continue
            sizes = [bytes_of(f) for f in formats]
            yield from bands_of(move, [shape for _, shape in formats], sizes, self._bucket_bytes)

    def _wire_bytes(self, move: Move, is_send: bool) -> int:
        return sum(bytes_of(f) for f in self._formats[move.id, is_send])

    # ---- moving

    def _stream(self, channel: Channel) -> None:
        me = self.comm.rank
        to_by = {(stage, self._round(me, peer)): peer for stage, peer in self._out}
        source_by = {(stage, self._round(peer, me)): peer for stage, peer in self._in}
        for key in sorted({*to_by, *source_by}):
            stage, to, source = key[0], to_by.get(key, -1), source_by.get(key, -1)
            out, coming = self._out.get((stage, to), ()), self._in.get((stage, source), ())
            for bucket in coming[:2]:
                channel.expect(source, self._size(bucket))
            for i in range(max(len(out), len(coming))):
                if i < len(out):
                    while self._steps and channel.would_wait():
                        self._steps.popleft()()
                    slot = channel.acquire()
                    self._guard(self._pack, (stage, to, i), out[i], slot)
                    channel.post(to, self._size(out[i]))
                if i < len(coming):
                    while self._steps and channel.would_wait_for(source):
                        self._steps.popleft()()
                    slot = channel.take(source)
                    self._guard(self._unpack, (stage, source, i), coming[i], slot)
                    channel.release(source)
                    if i + 2 < len(coming):
                        channel.expect(source, self._size(coming[i + 2]))
        channel.finish()

    def _round(self, source: int, to: int) -> int:
        """Return the round in which one rank sends to another: the difference of their places in the two lines."""
        rounds = max(len(self._senders), len(self._receivers))
        return (self._receivers.index(to) - self._senders.index(source)) % rounds

    def _size(self, bucket: Bucket) -> int:
        if not self.checksums:
            return bucket.size_bytes
        return -(-bucket.size_bytes // 8) * 8 + 8 * (1 + len(bucket.pieces))

    def _pack(self, place: tuple[int, int, int], bucket: Bucket, slot: Array) -> None:
        key = (*place, True)
        found = known = self._packers.get(key)
        if found is None or self._quantised:
            plain, prepared = self._sorted(bucket)
            spans = [inner_span(span_of(self._source(p.move), p.move.src_box), p.box) for p in plain]
            packer = Packer(spans, [p.offset_bytes for p in plain], self._anchor)
            found = self._packers[key] = packer, _together(prepared)
        packer, rest = found
        past = self._choice is not None and self._choice.begin(
            known is not None and bucket.size_bytes >= TRIAL_BYTES
        )
        packer.pack(slot, past)
        for pieces in rest:
            if not self._send_in_place(pieces, slot, past):
                for piece in pieces:
                    self._put(piece, slot)
        if self._choice is not None:
            self._choice.end(bucket.size_bytes)
        if self.checksums:
            self._seal(bucket, slot)

    def _put(self, piece: Piece, slot: Array) -> None:
        """Copy a piece of what a transform has prepared."""
        arrays = self._prepared(piece.move)
        raw = arrays[max(piece.component, 0)].reshape(-1).view(np.uint8)
        begin, end = self._byte_range(piece)
        slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes] = raw[begin:end]
        if end == raw.size and piece.component in (-1, len(arrays) - 1):
            self._sent(piece.move)

    def _unpack(self, place: tuple[int, int, int], bucket: Bucket, slot: Array) -> None:
        if self.checksums:
            self._check_seal(place[1], bucket, slot)
        key = (*place, False)
        found = self._packers.get(key)
        if found is None:
            plain, prepared = self._sorted(bucket)
            spans = [inner_span(span_of(self._dst[p.move.entry], p.move.dst_box), p.box) for p in plain]
            packer = Packer(spans, [p.offset_bytes for p in plain], self._anchor, streams=True)
            found = self._packers[key] = packer, _together(prepared)
        packer, rest = found
        packer.unpack(slot)
        for pieces in rest:
            if not self._take_in_place(pieces, slot):
                for piece in pieces:
                    self._get(piece, slot)

    def _get(self, piece: Piece, slot: Array) -> None:
        """Copy a piece into the room that a transform has made; finish the move with its last piece."""
        held = self._half.get(piece.move.id)
        if held is None:
            wanted = self._take_room(piece.move)
            forms = self._formats[piece.move.id, False]
            arrays = [
                w if w.nbytes == bytes_of(f) else self.comm.xp.empty(f[1], dtypes.get(f[0]).numpy)
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

    # ---- transforms that read and write where things lie

    def _send_in_place(self, pieces: Sequence[Piece], slot: Array, past_caches: bool) -> bool:
        """Have what travels made in the bucket; False where it is prepared first, for several to get the same."""
        move = pieces[0].move
        forms = self._formats[move.id, True]
        box = self._box_of(pieces, forms)
        if box is None or not self._makes_once(move):
            return False
        entry = self.plan.entries[move.entry]
        name, source = entry.src_local_name(move.src_rank), self._source(move)
        out, part = _views(pieces, forms, box, slot), slices_of(_moved(box, move.src_box))
        assert self.transform is not None
        if self.transform.travels_plain(name, move.dst_box):
            assign(out[0], source[part])
        else:
            self.transform.past_caches = past_caches
            self.transform.send_rows(name, part, source, out)
        return True

    def _take_in_place(self, pieces: Sequence[Piece], slot: Array) -> bool:
        """Give the transform what lies in the bucket; False where it is gathered in the transform's room first."""
        move = pieces[0].move
        forms = self._formats[move.id, False]
        box = self._box_of(pieces, forms)
        if box is None:
            return False
        name = self.plan.entries[move.entry].dst_local_name(move.dst_rank)
        assert self.transform is not None
        came = _views(pieces, forms, box, slot)
        self.transform.recv_rows(name, slices_of(_moved(box, move.dst_box)), came)
        return True

    def _box_of(self, pieces: Sequence[Piece], forms: Sequence[Format]) -> Box | None:
        """Return which part of a move's box pieces carry all of, or None: they go through arrays of their own."""
        if not self._in_place:
            return None
        first = pieces[0]
        if first.component < 0:
            return first.box
        extents = shape_of(first.move.src_box)
        rows = set()
        for piece, (_, shape), form in zip(pieces, forms, forms, strict=False):
            if shape[:1] != extents[:1]:
                return None
            begin, end = piece.box[0]
            per = bytes_of(form) // shape[0]
            rows.add((begin / per, end / per))
        if len(pieces) != len(forms) or len(rows) != 1:
            return None
        ((begin_row, end_row),) = rows
        if begin_row % 1 or end_row % 1:
            return None
        return ((int(begin_row), int(end_row)), *((0, n) for n in extents[1:]))

    def _sorted(self, bucket: Bucket) -> tuple[list[Piece], list[Piece]]:
        plain: list[Piece] = []
        prepared: list[Piece] = []
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


def _together(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return pieces by what they may carry together: an array of a move, and those after it."""
    found: list[list[Piece]] = []
    for piece in pieces:
        last = found[-1][-1] if found else None
        if (
            last is None
            or piece.move is not last.move
            or piece.component != last.component + 1
            or not piece.component
        ):
            found.append([])
        found[-1].append(piece)
    return found


def _views(pieces: Sequence[Piece], forms: Sequence[Format], box: Box, slot: Array) -> list[Array]:
    """Return what pieces that carry a part of a move are in a bucket."""
    found = []
    for piece, (dtype, shape) in zip(pieces, forms, strict=True):
        extents = shape_of(box) if piece.component < 0 else (box[0][1] - box[0][0], *shape[1:])
        raw = slot[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
        found.append(raw.view(dtypes.get(dtype).numpy).reshape(extents))
    return found


def _moved(box: Box, into: Box) -> Box:
    """Return a box that is counted from the begin of another as one beside that."""
    return tuple((at + start, at + stop) for (start, stop), (at, _) in zip(box, into, strict=True))
