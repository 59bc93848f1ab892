"""Runs a reshard plan: what stays is copied, what neighbours show is read where it lies, the rest goes in buckets.

Memory beside the arrays is bounded: two buckets out and two in. Ranks send and receive at once, each to the k-th
after it and from the k-th before it, for k = 1, 2, ...: every rank is in one pair each way at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lowshard.box import shape_of
from lowshard.comm.agreement import agree, share
from lowshard.comm.protocol import Communicator
from lowshard.errors import LowshardError, MismatchError
from lowshard.kernels.buffer import address
from lowshard.reshard.channel import Channel, MessageChannel, NodeView, SlotChannel
from lowshard.reshard.plan import Move, ReshardPlan
from lowshard.reshard.stream import Stream
from lowshard.reshard.transform import ReshardTransform
from lowshard.reshard.wire import Copier, Packer, Span, packed_span, span_of

Array = Any
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


class Reshard(Stream):
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
        super().__init__(plan, src, dst, comm, transform)
        self._like = like
        self._channel: Channel | None = None
        self._direct: Copier | None = None
        self._just_made = False
        self.checksums, self.version = checksums, 0
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
        if self._quantised:  # such sources lie elsewhere each time
            self._local = self._local_copier()
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

    # ---- laying out

    def _lay_out(self, view: NodeView | None, way: Way) -> None:
        comm = self.comm
        anchor = comm.xp.zeros(64, np.uint8)
        self._anchor = anchor
        self._local_transformed = [m for m in self._mine.copies if self._is_prepared(m)]
        self._local = self._local_copier()
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
        self._channel = None
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

    def _local_copier(self) -> Copier:
        plain = [m for m in self._mine.copies if not self._is_prepared(m)]
        sources = [span_of(self._src[m.entry], m.src_box) for m in plain]
        return Copier(sources, [span_of(self._dst[m.entry], m.dst_box) for m in plain], self._anchor)

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


def _displs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


__all__ = ["Report", "Reshard", "execute_reshard_plan"]
