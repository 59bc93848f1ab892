"""Runs a reshard plan: what stays is copied, what neighbours show is read where it lies, the rest goes in buckets.

Memory beside the arrays is bounded: two buckets out and, where they come as messages, two in. Ranks send and receive
at once: those that send stand in one line, those that receive in another, and in round k each sends to the place k
after its own. So every rank is in one pair each way at a time, in as many rounds as the longer line has places.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from lowshard.argument import choice, whole
from lowshard.box import shape_of
from lowshard.comm.agreement import agree, control_of, share
from lowshard.comm.protocol import Communicator
from lowshard.comm.work import Stream
from lowshard.errors import LowshardError, MismatchError, PlanError
from lowshard.reshard.bucket_channel import SLOTS, Channel, MessageChannel, SlotChannel, set_aside
from lowshard.reshard.bucket_stream import BucketStream
from lowshard.reshard.buckets import STREAMED_BYTES, Copier, Part, buckets_of, inner_span, span_of
from lowshard.reshard.direct_read import Sight
from lowshard.reshard.node_view import NodeView
from lowshard.reshard.reshard_plan import Move, ReshardPlan
from lowshard.reshard.transform_contract import ReshardTransform
from lowshard.reshard.write_choice import WriteChoice

Array = Any
Way = Literal["auto", "direct", "slots", "messages"]

STAGING_BYTES = 16 << 20
"""Memory for buckets on each rank, by default."""
MOST_STAGING_BYTES = 1 << 60
CACHED_BYTES = 2 << 20
"""Buckets that are unpacked where they were packed are no larger: they are still in the caches then, as those of the
other ranks are, and what goes through memory is read once and written once, as by a copy. Smaller ones cost more in
turns to wait for."""
_DIRECT, _SLOTS, _MESSAGES = "direct", "slots", "messages"


class Settings(TypedDict, total=False):
    """How a plan is run; equal on all ranks."""

    staging_bytes: int
    """Bound on the memory for buckets, by default STAGING_BYTES."""
    checksums: bool
    """Send a checksum with every piece and compare; False by default."""
    way: Way
    """How bytes move. "direct" reads sources where they lie, on one node and without checksums: arrays of `comm.empty`,
    and others where processes may read each other's memory (not with LOWSHARD_CROSS_MEMORY=off); the rest, and all of
    it with checksums, goes by "slots": memory that senders pack into and receivers unpack from. "messages" sends
    buckets. "auto", the default, takes the first of these that works on all ranks."""


def argument_error(
    plan: object, src: object, dst: object, transform: object, settings: Mapping[str, object]
) -> LowshardError | None:
    """Return what is wrong with the arguments of a `Reshard` on this rank, before any is used, or None."""
    if not isinstance(plan, ReshardPlan):
        return PlanError(f"plan is a ReshardPlan, from build_reshard_plan, got {type(plan).__name__}")
    for name, arrays in (("src", src), ("dst", dst)):
        if arrays is not None and not isinstance(arrays, Mapping):
            return PlanError(f"{name} is a mapping of names to arrays, or None, got {type(arrays).__name__}")
    if transform is not None and not isinstance(transform, ReshardTransform):
        return PlanError(f"transform is a ReshardTransform or None, got {type(transform).__name__}")
    strange = sorted(map(str, settings.keys() - Settings.__annotations__.keys()))
    if strange:
        return PlanError(f"settings are {', '.join(Settings.__annotations__)}, got {', '.join(strange)}")
    try:
        choice(
            settings.get("way", "auto"), get_args(Way), f"way is one of {', '.join(get_args(Way))}", PlanError
        )
        rule = f"staging_bytes is a number of bytes from 1 to {MOST_STAGING_BYTES}"
        whole(settings.get("staging_bytes", STAGING_BYTES), rule, PlanError, 1, MOST_STAGING_BYTES)
    except PlanError as error:
        return error
    if not isinstance(settings.get("checksums", False), bool):
        return PlanError(f"checksums is True or False, got {settings['checksums']!r}")
    return None


def _like_error(like: object) -> LowshardError | None:
    if like is None or isinstance(like, Reshard):
        return None
    return PlanError(f"like is another Reshard or None, got {type(like).__name__}")


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


class Reshard(BucketStream, Sight):
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
        like: another one over the same communicator and with the same settings, whose staging is used: the two never
            run at once.
        settings: staging_bytes, checksums and way; see `Settings`.

    Every rank raises the same error, whichever is at fault, before anything is written.

    Raises:
        BufferMismatchError: an array is missing, or has another shape, dtype or memory order than the plan says.
        MeshError: the communicator lacks ranks of the plan.
        MismatchError: ranks hold different plans or settings, or two sides of a move prepare unequal arrays.
        PlanError: sources do not cover what is needed, or an argument that is none of those listed.
        CommError: a rank has no memory for its buckets.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        src: Mapping[str, Any] | None,
        dst: Mapping[str, Any] | None,
        comm: Communicator,
        transform: ReshardTransform | None = None,
        *,
        like: Reshard | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        control_of(comm)
        error = argument_error(plan, src, dst, transform, settings)
        error = error or _like_error(like)
        if error is not None:  # the others come to the same agreement
            agree(comm, b"", error, "execute_reshard_plan")
        super().__init__(plan, src, dst, comm, transform)
        way, checksums = settings.get("way", "auto"), settings.get("checksums", False)
        staging_bytes = settings.get("staging_bytes", STAGING_BYTES)
        self._like = like
        self._forget_sources()
        self._channel: Channel | None = None
        self._just_made = self._has_run = False
        self.checksums, self.version = checksums, 0
        with comm._meeting("Reshard"):
            self._make_ready(way, checksums, staging_bytes)

    def _make_ready(self, way: Way, checksums: bool, staging_bytes: int) -> None:
        comm, plan = self.comm, self.plan
        view = NodeView.of(comm) if way != _MESSAGES and comm.xp is np else None
        self._staged = SLOTS if view is not None else 2 * SLOTS  # receivers unpack out of the senders' slots
        most_bytes = CACHED_BYTES if view is not None else staging_bytes
        self._bucket_bytes = max(256, min(most_bytes, staging_bytes // self._staged) // 64 * 64)
        self._guard(self._prepare)
        said = f"{plan.digest()} {self._bucket_bytes} {checksums} {way}"
        digest = hashlib.blake2b(said.encode(), digest_size=16).digest()
        agree(comm, digest, self._take_error(), "execute_reshard_plan")
        self._shake_hands()
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

    def run(self, version: int = 0, *, stream: Stream = None) -> Report:
        """Move what the source arrays hold now. Collective.

        Args:
            version: travels with the checksums; a bucket of another version is an error.
            stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one.

        Raises:
            VerificationError: a checksum does not agree; the text names tensor and sender. The others as the
                transform raises them. (Each on every rank; destination arrays are undefined then.)
            PeerFailed: a rank failed or died.
        """
        self.comm._enter("reshard")
        try:
            with self.comm._meeting("Reshard.run", stream) as wrong:
                return self._run(version, wrong)
        finally:
            self.comm._turn.release()

    def _run(self, version: int, error: LowshardError | None) -> Report:
        self.version = version
        self._error = error
        if not self._just_made:  # what was prepared to learn its form is of an earlier content
            self._kept.clear()
            self._pending.clear()
            self._rooms.clear()
        self._just_made = False
        self._half.clear()
        self._left.clear()
        for entry in self._quantised:
            self._guard(self._refresh, entry)
        if self._quantised:  # such sources lie elsewhere each time
            self._local = self._local_copiers()
        if self.transform is not None:
            self._guard(self.transform.begin)
        if self._has_run:
            self._settle_sources()
        self._has_run = True
        if self._is_direct:
            self.comm._barrier()  # the sources of all ranks are as they shall be
        self._steps.clear()
        self._steps.extend(copier.run for copier in self._local)
        self._steps.extend(partial(self._guard, self._copy_transformed, m) for m in self._local_transformed)
        if not (self._out or self._in):
            self._do_steps()
        if self._is_direct:
            self._read()
        if self._channel is not None:
            self._stream(self._channel)
        self._do_steps()
        if self.transform is not None and self._error is None:
            self._guard(self.transform.end)
        agree(self.comm, b"", self._take_error(), "reshard")
        report = self.report
        if not isinstance(self._channel, MessageChannel):  # messages are counted as they are sent
            self.comm.traffic.add("reshard", report.sent_bytes, report.received_bytes)
        return report

    def close(self) -> None:
        """Let go of arrays and staging. Closing twice is safe."""
        self._channel = self._like = None
        self._src, self._dst, self._given = {}, {}, ({}, {})
        self._packers.clear()
        self._forget_sources()

    # ---- laying out

    def _lay_out(self, view: NodeView | None, way: Way) -> None:
        comm = self.comm
        anchor = comm.xp.zeros(64, np.uint8)
        self._anchor = anchor
        self._local_transformed = [m for m in self._mine.copies if self._is_prepared(m)]
        self._local = self._local_copiers()
        self._steps = deque()
        streams_out: Mapping[int, Sequence[Move]] = self._mine.sends
        streams_in: Mapping[int, Sequence[Move]] = self._mine.receives
        if view is not None and way in ("auto", _DIRECT) and not self.checksums:
            streams_out, streams_in = self._look(view)
        self._out = self._buckets(streams_out, True)
        self._in = self._buckets(streams_in, False)
        busy = share(comm.control, np.array([bool(self._out), bool(self._in)], np.uint8))
        self._senders, self._receivers = ([r for r, row in enumerate(busy) if row[i]] for i in (0, 1))
        any_busy = bool(self._senders or self._receivers)
        room = self._bucket_bytes + (8 * (2 + self._most_pieces()) if self.checksums else 0)
        if self.checksums:  # both sides of a slot need the same room: take the largest
            room = int(max(row[0] for row in share(comm.control, np.array([room], np.int64))))
        self._channel = self._like._channel if self._like is not None and any_busy else None
        if any_busy and (self._channel is None or self._channel.bucket_bytes != room):
            slots = self._guard(set_aside, comm, room, self._staged)
            agree(comm, b"", self._take_error(), "execute_reshard_plan")
            self._channel = (
                SlotChannel(comm, slots, view) if view is not None else MessageChannel(comm, slots)
            )
        in_memory = isinstance(self._channel, SlotChannel)
        self._choice = (
            WriteChoice() if in_memory and not self.checksums else None
        )  # those read what they sum up
        self._packers = {}
        self._half: dict[int, tuple[list[Array], list[Array]]] = {}
        self._left: dict[int, int] = {}
        sent = sum(self._wire_bytes(m, True) for found in self._mine.sends.values() for m in found)
        received = sum(self._wire_bytes(m, False) for found in self._mine.receives.values() for m in found)
        self.report = Report(
            sent,
            received,
            sum(self.plan.move_bytes(m) for m in self._mine.copies),
            sum(map(len, self._out.values())),
            0 if self._channel is None else self._staged * room,
        )

    def _do_steps(self) -> None:
        """Do what is left of this rank's own."""
        while self._steps:
            self._steps.popleft()()

    def _local_copiers(self) -> list[Copier]:
        """Return what copies within this rank, in parts that are small beside a turn to wait for."""
        entries, found = self.plan.entries, []
        plain = [m for m in self._mine.copies if not self._is_prepared(m)]
        parts = (Part(m, -1, shape_of(m.src_box), entries[m.entry].src.itemsize_bytes) for m in plain)
        streams = sum(map(self.plan.move_bytes, plain)) >= STREAMED_BYTES
        for bucket in buckets_of(([part] for part in parts), CACHED_BYTES):
            sources, targets = [], []
            for p in bucket.pieces:
                sources.append(inner_span(span_of(self._src[p.move.entry], p.move.src_box), p.box))
                targets.append(inner_span(span_of(self._dst[p.move.entry], p.move.dst_box), p.box))
            found.append(Copier(sources, targets, self._anchor, streams))
        return found


def execute_reshard_plan(
    plan: ReshardPlan,
    src: Mapping[str, Any] | None,
    dst: Mapping[str, Any] | None,
    comm: Communicator,
    transform: ReshardTransform | None = None,
    *,
    stream: Stream = None,
    **settings: Unpack[Settings],
) -> Report:
    """Move tensors as a plan says, from the arrays of `src` into those of `dst`.

    Collective: all ranks of the communicator call this. Arguments and errors: as for `Reshard`, which keeps what is
    made ready for another run, and its `run`.
    """
    made = Reshard(plan, src, dst, comm, transform, **settings)
    try:
        made._just_made = True
        return made.run(stream=stream)
    finally:
        made.close()


__all__ = ["Report", "Reshard", "Settings", "execute_reshard_plan"]
