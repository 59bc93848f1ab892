"""Runs a reshard plan: checks a rank's arrays, agrees with the other ranks, and moves the bytes.

Staging memory is bounded: two buckets to send and, where they arrive as messages, two to receive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from lowshard.argument import instance, one_of, whole
from lowshard.comm.agreement import collective_step, control_of
from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Stream
from lowshard.content_hash import text_digest
from lowshard.errors import CommError, LowshardError, MismatchError, PlanError
from lowshard.reshard.rank_side import Side
from lowshard.reshard.reshard_plan import ReshardPlan
from lowshard.transfer.item import Item
from lowshard.transfer.mover import Mover, Streams, bucket_sizes
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
Way = Literal["auto", "direct", "slots", "messages"]

STAGING_BYTES = 16 << 20
"""Default bound on staging memory of each rank."""
MOST_STAGING_BYTES = 1 << 60
_DIRECT, _SLOTS, _MESSAGES = "direct", "slots", "messages"


class Settings(TypedDict, total=False):
    """How a plan is run; equal on all ranks."""

    staging_bytes: int
    """Bound on the memory for buckets, by default STAGING_BYTES."""
    checksums: bool
    """Send a checksum with every piece and compare; False by default."""
    way: Way
    """How bytes move. "direct" reads sources in place, without checksums: arrays of `comm.empty`, and others where
    processes may read each other's memory (not with LOWSHARD_CROSS_MEMORY=off); the rest, and everything with
    checksums, uses "slots": shared buffers that senders pack and receivers unpack. Both need ranks that all reach each
    other's memory. "messages" sends buckets. "auto", the default, takes for each pair of ranks the first that works."""


_DEFAULTS: Settings = {"staging_bytes": STAGING_BYTES, "checksums": False, "way": "auto"}


def check_arguments(
    plan: object, src: object, dst: object, transform: object, settings: Mapping[str, Any], like: object = None,
) -> None:  # fmt: skip
    """Raise what is wrong with the arguments of a `Reshard` on this rank."""
    if not isinstance(plan, ReshardPlan):
        raise PlanError(f"plan is a ReshardPlan, from build_reshard_plan, got {type(plan).__name__}")
    for name, arrays in (("src", src), ("dst", dst)):
        if arrays is not None and not isinstance(arrays, Mapping):
            raise PlanError(f"{name} is a mapping of names to arrays, or None, got {type(arrays).__name__}")
    if transform is not None and not isinstance(transform, ReshardTransform):
        raise PlanError(f"transform is a ReshardTransform or None, got {type(transform).__name__}")
    strange = sorted(map(str, settings.keys() - Settings.__annotations__.keys()))
    if strange:
        raise PlanError(f"settings are {', '.join(Settings.__annotations__)}, got {', '.join(strange)}")
    given = {**_DEFAULTS, **settings}
    if not (like is None or isinstance(like, Reshard)):
        raise PlanError(f"like is another Reshard or None, got {type(like).__name__}")
    one_of(given["way"], get_args(Way), "way", PlanError)
    rule = f"staging_bytes is a number of bytes from 1 to {MOST_STAGING_BYTES}"
    whole(given["staging_bytes"], rule, PlanError, 1, MOST_STAGING_BYTES)
    instance(given["checksums"], bool, "checksums is True or False", PlanError)


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

    @classmethod
    def of(cls, mover: Mover) -> Report:
        """Return the report of a mover's run."""
        return cls(
            mover.sent_bytes, mover.received_bytes, mover.copied_bytes, mover.buckets, mover.staging_bytes
        )


@dataclass(slots=True)
class RefitCost:
    """The cost of a version on a rank, filled while it is moved; `Refit.report` explains the fields."""

    dense_bytes: int = 0
    sent_bytes: int = 0
    changed_elems: int = 0
    pause_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a `with` block to a phase."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start_s

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a copy."""
        return asdict(self)


class Reshard:
    """A plan made ready for given arrays: addresses looked up, buckets laid out, staging set aside.

    `run` moves the arrays' present content, as often as you like. Collective: all ranks of the communicator make it,
    run it and close it together.

    Args:
        plan: equal on every rank (its digest is compared).
        src: this rank's source arrays by their names on this rank; what the plan does not take is left alone. A
            quantised tensor (data and scale) is taken for what it stands for. None on a rank without any.
        dst: its destination arrays by name; what a transform stores needs none.
        comm: a communicator that has every rank of the plan; others take part with nothing.
        transform: what this rank's tensors go through; the other ranks may have another one, or none.
        like: another one over the same communicator and with the same settings, whose staging is used: the two never
            run at once.
        settings: equal on all ranks. staging_bytes: bound on the memory for buckets; 16 MiB by default. checksums:
            True sends a checksum with every piece and compares; False by default. way: as in `Settings`.

    Every rank raises the same error, whichever is at fault, before anything is written.

    Raises:
        BufferMismatchError: an array is missing, or has another shape, dtype or memory order than the plan says; or a
            destination shares memory with another or with a source, and not one source feeds both.
        MeshError: the communicator lacks ranks of the plan.
        MismatchError: ranks hold different plans or settings, or two sides of a move prepare unequal arrays.
        PlanError: sources do not cover what is needed, or an argument is not one of the values listed.
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
        self.comm, self._just_made = comm, False
        self._settings: Settings = {**_DEFAULTS, **settings}
        with comm.meeting("Reshard"):
            with collective_step(comm, "reshard") as step:
                check_arguments(plan, src, dst, transform, settings, like)
                self.side = side = Side(plan, src, dst, comm, transform)
                side.prepare()
                step.digest, step.said = self._digest()
            with collective_step(comm, "reshard", meets=True) as step:
                side.make_items(step)
            other = None if like is None else like._mover
            mover = self._mover_of(side.sends, side.receives, side.copies, other)
        self._mover: Mover | None = mover
        self._parts_mover: Mover | None = None
        self.report = Report.of(mover)

    def _digest(self) -> tuple[bytes, Callable[[], str]]:
        """Return what is compared of plan and settings, and it in words."""
        comm, plan, settings = self.comm, self.side.plan, self._settings
        way, checksums, staging_bytes = settings["way"], settings["checksums"], settings["staging_bytes"]
        by_memory = way != _MESSAGES and comm.xp is np
        if way in (_DIRECT, _SLOTS) and not (comm.reach.whole and by_memory):
            raise MismatchError(
                f"way {way!r} needs ranks that see each other's memory, which {comm.transport} has not"
            )
        said = f"{plan.digest()} {bucket_sizes(comm, by_memory, staging_bytes)} {checksums} {way}"
        words = f"plan {plan.digest()[:8]} of {len(plan.entries)} tensors, staging_bytes {staging_bytes}"
        return text_digest(said), lambda: f"{words}, checksums {checksums}, way {way}"

    def _mover_of(
        self, sends: Streams, receives: Streams, copies: Sequence[Item], like: Mover | None
    ) -> Mover:
        way, checksums = self._settings["way"], self._settings["checksums"]
        return Mover(
            self.comm, sends, receives, copies, self.side.published(), self.side.conversion,
            by_memory=way != _MESSAGES and self.comm.xp is np,
            in_place=way in ("auto", _DIRECT) and not checksums, checksums=checksums,
            staging_bytes=self._settings["staging_bytes"], like=like,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = ", closed" if self._mover is None else ""
        return f"<Reshard of {len(self.side.plan.entries)} tensors, rank {self.comm.rank} of {self.comm.size}{state}>"

    # ---- running

    def run(self, version: int = 0, *, stream: Stream = None) -> Report:
        """Move what the source arrays hold now. Collective.

        Args:
            version: travels with the checksums; a bucket of another version is an error.
            stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one.

        Raises:
            VerificationError: a checksum does not agree; the text names tensor and sender. Every rank raises it; the
                destination arrays are undefined then. The same holds for what a transform raises.
            PeerFailed: a rank failed or died.
        """
        with self.comm.turn("reshard"), self.comm.meeting("Reshard.run", stream) as wrong:
            return self._run(version, wrong)

    def _run(self, version: int, error: LowshardError | None) -> Report:
        mover, conversion = self._mover, self.side.conversion
        if mover is None:
            raise CommError("this Reshard is closed; make a new one")
        with collective_step(self.comm, "reshard", meets=True) as step:
            step.error = error
            if conversion is not None:
                conversion.begin(self._just_made)
                step.attempt(conversion.transform.begin)
            self._just_made = False
            if self.side.quantised:
                step.attempt(self.side.refresh)
                mover.drop_sources()
            mover.run(version, step)
            if conversion is not None:
                step.attempt(conversion.transform.end)
        mover.count()
        return self.report

    def run_parts(
        self,
        version: int,
        sends: Streams,
        receives: Streams,
        copies: Sequence[Item],
        finish: Callable[[], object],
    ) -> Report:
        """Move some of the plan's items and others, then call `finish` when all have arrived. Collective."""
        conversion = self.side.conversion
        with self.comm.turn("reshard"):
            mover = self._mover_of(sends, receives, copies, self._parts_mover or self._mover)
            self._parts_mover = mover
            with collective_step(self.comm, "reshard", meets=True) as step:
                if conversion is not None:
                    conversion.begin(False)
                    step.attempt(conversion.transform.begin)
                mover.run(version, step)
            with collective_step(self.comm, "reshard"):
                finish()
                if conversion is not None:
                    conversion.transform.end()
            mover.count()
        return Report.of(mover)

    def sources(self) -> dict[str, Array]:
        """Return the source arrays that `run` reads in place, by name."""
        return self.side.sources()

    def close(self) -> None:
        """Drop arrays and staging memory. Closing twice is safe."""
        self._mover = self._parts_mover = None
        self.side.close()


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
