"""Refit: keeps serving weights in step with training weights, each version whole or not at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, Unpack, get_args, overload

import numpy as np

from lowshard.argument import brief, choice
from lowshard.box import volume
from lowshard.comm.agreement import collective_step, control_of, share
from lowshard.comm.background import Background
from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Stream, Work
from lowshard.content_hash import text_digest
from lowshard.errors import CommError, MismatchError, PeerFailed, PlanError, TimedOut, VerificationError
from lowshard.foreign_array import like, never_change, view_of
from lowshard.kernels.buffer import is_gpu, twins_of
from lowshard.reshard.published_tensors import same_again
from lowshard.reshard.reshard_plan import ReshardPlan
from lowshard.reshard.reshard_run import RefitCost, Report, Reshard, Settings, check_arguments
from lowshard.reshard.version_changes import VersionChanges
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
Buffering = Literal["double", "in_place"]
Delta = Literal["off", "auto", "always"]
_NONE = -1
_COMMIT, _ABORT = 1, 2
_LINE_BYTES, _FEW_LINES, _STEP_BYTES = 64, 64, 64 << 10


class _Served(NamedTuple):
    """The set that is served, its version, and whether it is a mix. Replaced as one."""

    at: int
    version: int | None
    torn: bool = False


class Refit:
    """Moves new versions of tensors from the ranks that train them to those that serve them.

    A version is switched to when all of it has arrived, its checksums agree, and all ranks have said so: prepare, vote,
    switch. With two sets of destination arrays ("double") the old version is served until then, and a refit that
    fails or is killed leaves it whole; the next one works. "in_place" writes into the arrays that are served, for half
    the memory: from the first byte to the switch they are `torn`, and so they stay where a refit fails.

    When a rank dies, `weights` of every survivor are one whole version, the old one or the new one, never a mix
    ("double"), and `version` says which. Survivors on one host always have the same one: they decide through a word in
    shared memory. Survivors on different hosts, or without shared memory (`LOWSHARD_CPU_PATH=mpi`), may differ if the
    rank died between the last vote and the switch, since a message about it may be lost with its sender. So before
    ranks of several hosts serve together again, compare `version` over a communicator of the survivors, and push again
    where it differs.

    With `delta` versions form a chain: the copy of what was sent is updated when all ranks have switched to a version,
    and kept when they have not. Changes that were not pushed are in the next push.

    Collective: all ranks of the communicator make it and close it; each version is one call on every rank: `push` where
    there are sources, `pull` elsewhere. Addresses, memory and open files stay as they are from the first call on.

    Args:
        plan: from `build_reshard_plan`, equal on every rank.
        comm: a communicator with every rank of the plan.
        src: this rank's source arrays by name; the same arrays serve every version. JAX's never change: for those give
            NumPy's, and copy into them before each version.
        dst: its destination arrays, which hold version `version`; each in memory of its own. One array may stand for
            two names that one source feeds.
        transform: what this rank's tensors go through.
        buffering: what becomes of the arrays of `dst`, and of what the transform stores into (the persistent buffers of
            `MXFP8ReshardTransform`). "double": a second set is made beside them, and versions alternate: the first
            goes to the second set, the next to the arrays that were given, and so on. So read `weights`, again after
            each refit, and not the arrays that were given. "in_place": every version is written into those.
        delta: "auto": for each tensor and destination only what differs, bit by bit, from the version before is sent,
            or all of it where that is less; "always": what differs, even where that is more; "off": all of it. Each
            rank with sources then keeps a copy of what it sent last; `multicast` of the plan is ignored. The first
            version, and one after a failure "in_place", goes whole; so do boxes of a transform that takes no blocks
            (`ReshardTransform.change_block_elems`), as MXFP8 boxes that begin or end within a block. Do not write to
            the destinations between versions: changed elements may be sent as differences.
        version: of what dst holds now, or None for nothing yet.
        settings: staging_bytes, checksums and way, as for `Reshard`. Here checksums are on by default: every piece that
            travels is checked, and sources are not read where they lie, for which that would take longer.

    Raises:
        PlanError: "double" with a transform that has no twin, or another buffering or version than said.
        CommError: a rank has no memory for the second set.
        LowshardError: as `Reshard`.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        comm: Communicator,
        src: Mapping[str, Any] | None = None,
        dst: Mapping[str, Any] | None = None,
        transform: ReshardTransform | None = None,
        *,
        buffering: Buffering = "double",
        delta: Delta = "off",
        version: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.plan, self.buffering = plan, buffering
        self._now, self._attempt = _Served(0, version), 0
        self._closed = False
        self._torn_s: float | None = None
        settings.setdefault("checksums", True)
        sets: list[dict[str, Array]] = []
        served: list[dict[str, Any]] = []
        transforms = [transform]
        with collective_step(control_of(comm), "Refit") as step:
            check_arguments(plan, src, dst, transform, settings)
            choice(buffering, get_args(Buffering), "buffering is 'double' or 'in_place'", PlanError)
            choice(delta, get_args(Delta), "delta is 'off', 'auto' or 'always'", PlanError)
            if delta != "off" and plan.multicast:
                plan = replace(plan, multicast=False)
            if version is not None:
                self._now = _Served(0, version_number(version))
            given = dict(dst or {})
            sets.append({n: view_of(a, str(n), writes=True) for n, a in given.items()})
            served.append(given)
            if buffering == "double":
                sets.append(_twins(comm, sets[0]))
                served.append({n: like(a, given[n]) for n, a in sets[1].items()})
                transforms.append(None if transform is None else transform.twin())
            served = [
                a if how is None else {**a, **how.refit_weights()}
                for a, how in zip(served, transforms, strict=True)
            ]
            step.digest = text_digest(f"{plan.digest()} {buffering} {delta}")
            words = f"plan {plan.digest()[:8]} of {len(plan.entries)} tensors, {buffering}, delta {delta}"
            step.said = lambda: words
        # A communicator of its own: a version is moved beside what the caller does, over any other one.
        self._background = Background(comm, "lowshard refit")
        self.comm: Communicator = self._background.comm
        comm = self.comm
        self._serves_sources = any(comm.rank in entry.src for entry in plan.entries)
        self._never_changes, self._has_pushed = never_change((src or {}).values()), False
        self._served, self._transforms = served, transforms
        self._movers: list[Reshard] = []
        for arrays, how in zip(sets, transforms, strict=True):
            first = self._movers[0] if self._movers else None
            mover = Reshard(plan, src, arrays, comm, how, like=first, **settings)
            self._movers.append(mover)
        self._changes: VersionChanges | None = None
        if delta != "off":
            self._changes = VersionChanges(comm, self._movers, delta == "always")
        self._vote = Vote(comm)
        self._readers, self._reading = [0] * len(served), threading.Condition()
        sends = plan.for_rank(comm.rank).sends.values()
        self._given_elems = sum(volume(move.src_box) for moves in sends for move in moves)
        self._cost = RefitCost()

    def __repr__(self) -> str:
        served = "no version" if self.version is None else f"version {self.version}"
        state = ", closed" if self._closed else ""
        seat = f"rank {self.comm.rank} of {self.comm.size}"
        return f"<Refit: {served} of {len(self.plan.entries)} tensors, {seat}{state}>"

    # ---- what is served

    @property
    def version(self) -> int | None:
        """The version of `weights`, or None before the first."""
        return self._now.version

    @property
    def torn(self) -> bool:
        """Whether `weights` are a mix of versions: only "in_place", during a refit and after one that failed."""
        return self._now.torn

    @property
    def weights(self) -> Mapping[str, Any]:
        """What holds the version that is served, by name. Ask again after each refit.

        Destination arrays, those that were given or others of their library; for tensors that a transform stores, what
        it stores them in: an `MXFP8Tensor`, say. With "double" buffering they stay whole until the refit after the next
        one begins; `reading` keeps them whole for as long as it takes.
        """
        return MappingProxyType(self._served[self._now.at])

    @contextmanager
    def reading(self) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
        """Hold the version that is served for a `with` block: gives its number and its weights, whole until the end.

        For threads that read while versions come in the background. A refit that would write over what is held waits
        until all readers have left their blocks, at most half of the communicator's deadline, and then fails on every
        rank. So a thread must not call push or pull, nor wait for one, inside its own block. Any number of threads read
        at once. Not collective.

        Raises:
            PlanError: the weights are written where they are served, with "in_place".
        """
        if self.buffering == "in_place":
            raise PlanError("weights that are written in place cannot be held; refit with buffering='double'")
        with self._reading:
            now = self._now
            self._readers[now.at] += 1
        try:
            yield now.version, MappingProxyType(self._served[now.at])
        finally:
            with self._reading:
                self._readers[now.at] -= 1
                self._reading.notify_all()

    @property
    def transform(self) -> ReshardTransform | None:
        """The transform whose buffers hold the version that is served."""
        return self._transforms[self._now.at]

    def report(self) -> dict[str, Any]:
        """Return what the last version that was switched to has cost this rank. Not collective.

        - `dense_bytes`: payload that this rank gives to others where all of it is sent.
        - `sent_bytes`: payload that it did give.
        - `changed_elems`: elements that it gave as changed; all that it gives where all of it was sent.
        - `pause_s`: seconds in which `weights` were no whole version: the switch alone with "double" buffering, from
          the first byte to the switch "in_place".
        - `phases`: seconds by phase, in order.

        Zeros and no phases before the first version.
        """
        return self._cost.as_dict()

    # ---- a version

    @overload
    def push(self, version: int, *, wait: Literal[True] = True, stream: Stream = None) -> Report: ...

    @overload
    def push(self, version: int, *, wait: Literal[False], stream: Stream = None) -> Work: ...

    @overload
    def push(self, version: int, *, wait: bool, stream: Stream = None) -> Report | Work: ...

    def push(self, version: int, *, wait: bool = True, stream: Stream = None) -> Report | Work:
        """Give the sources' present content as a version; on a rank that also serves, take it as well.

        Collective: every rank calls push or pull. Those that push name one version, and one of them has sources.

        With `wait=False` a thread does all of it, and a `Work` is returned at once: its `wait()` returns the report or
        raises the error, the same on every rank. Each rank chooses for itself. Other calls may go on meanwhile, also
        over the communicator that was given: a refit has one of its own. One version at a time: the next push or
        pull, and `close`, wait for it, and raise on every rank an error of it that no call has raised. The process
        does not end before it has.

        Do not change the sources until the work is done. Some bytes of every 64 KiB of those in host memory are
        compared at the end with what they were when push was called: if a source was changed meanwhile, as by a step
        of training, the version is refused on every rank, and the old one stays. A few changed elements can be missed.

        Args:
            version: an integer from 0 to 2^63 - 1.
            wait: False does it in the background.
            stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one of
                the caller, also in the background.

        Raises:
            PlanError: a version that is not an integer from 0 to 2^63 - 1, or a second one of arrays that never change,
                or only ranks without sources push it; on all ranks, and nothing has changed.
            MismatchError: ranks push different versions, or one waits for another than is pushed; on all ranks, and
                nothing has changed.
            VerificationError: a checksum does not agree, or sources were changed while they were pushed in the
                background; the old version stays, on all ranks.
            TimedOut: the arrays to be written were read for too long (`reading`), on some rank; the
                old version stays, on all ranks.
            PeerFailed: a rank died. `version` tells which one this rank serves, the same on all ranks of a host.
        """
        return self._call("push", version, True, wait, stream)

    @overload
    def pull(
        self, version: int | None = None, *, wait: Literal[True] = True, stream: Stream = None
    ) -> Report: ...

    @overload
    def pull(self, version: int | None = None, *, wait: Literal[False], stream: Stream = None) -> Work: ...

    @overload
    def pull(self, version: int | None = None, *, wait: bool, stream: Stream = None) -> Report | Work: ...

    def pull(self, version: int | None = None, *, wait: bool = True, stream: Stream = None) -> Report | Work:
        """Take the version that is pushed; with a number, that one and no other. Otherwise as `push`."""
        return self._call("pull", version, False, wait, stream)

    def _call(
        self, name: str, version: int | None, pushes: bool, wait: object, stream: Stream
    ) -> Report | Work:
        what = f"Refit.{name}"
        error = self._background.settle()
        if self._closed:
            raise CommError("this Refit is closed; make a new one")
        if not isinstance(wait, bool):
            wait, error = True, PlanError(f"wait of {name} is True or False, got {brief(wait)}")
        if pushes and self._never_changes and self._has_pushed and version != self.version:
            error = error or same_again(version)
        if wait:
            with self.comm.meeting(what, stream) as wrong:
                return self._refit(what, version, pushes, error or wrong, None)
        before = _sample(self._movers[0].sources()) if pushes else {}
        if stream is None and self.comm.xp is not np:
            stream = self.comm.xp.cuda.get_current_stream()

        def run() -> Report:
            with self.comm.meeting(what, stream) as wrong:
                return self._refit(what, version, pushes, error or wrong, before)

        return self._background.start(run, f"{what} of rank {self.comm.rank}")

    def _refit(
        self, what: str, version: int | None, pushes: bool, wrong: Exception | None,
        before: Mapping[str, bytes] | None,
    ) -> Report:  # fmt: skip
        """Move a version; `before` has samples of the sources if this runs in the background."""
        cost = RefitCost()
        target = 0 if self.buffering == "in_place" else 1 - self._now.at
        with cost.phase("readers"):
            wrong = wrong or self._await_readers(target)
        with cost.phase("agree"):
            number, in_background, follows = self._version_of_all(
                what, version, pushes, wrong, before is not None
            )
        self._attempt += 1
        try:
            report = self._move(target, number, follows, cost)
            if in_background:
                with cost.phase("sources"), collective_step(self.comm, "Refit"):
                    self._check_unchanged(before)
        except CommError:
            # A rank died or did not come, perhaps after some ranks learned that all are ready.
            if self._vote.decide(self._attempt, False):
                self._switch(target, number)
            raise
        with cost.phase("vote"):
            committed = self._vote.decide(self._attempt, True)
        if not committed:
            raise PeerFailed(f"another rank noticed a failure during the vote: version {self.version} stays")
        start_s = time.perf_counter() if self._torn_s is None else self._torn_s
        self._switch(target, number)
        cost.pause_s = time.perf_counter() - start_s
        if self._changes is not None:
            # If the baseline cannot be kept, only the next version goes whole.
            with cost.phase("keep"), contextlib.suppress(Exception):
                self._changes.commit(target, self._attempt)
        self._cost, self._has_pushed = cost, self._has_pushed or pushes
        return report

    def _move(self, target: int, number: int, follows: bool, cost: RefitCost) -> Report:
        """Move a version to all ranks, all of it or only the delta."""
        self._torn_s = None
        cost.changed_elems = self._given_elems
        if self._changes is not None:
            return self._changes.run(target, number, follows, cost, self._mark_torn)
        self._mark_torn()
        with cost.phase("move"):
            report = self._movers[target].run(number)
        cost.dense_bytes = cost.sent_bytes = report.sent_bytes
        return report

    def _mark_torn(self) -> None:
        """Record that the served arrays are being overwritten, with buffering="in_place"."""
        if self.buffering == "in_place" and self._torn_s is None:
            self._now, self._torn_s = self._now._replace(torn=True), time.perf_counter()

    def _await_readers(self, target: int) -> TimedOut | None:
        """Wait until no thread reads a set of arrays; return the error if that takes too long."""
        limit_s = self.comm.timeout_s / 2
        with self._reading:
            if self._reading.wait_for(lambda: not self._readers[target], limit_s):
                return None
        return TimedOut(
            f"rank {self.comm.rank} still reads arrays that the next version is written to, {limit_s:g} s after it was "
            "to come: threads leave their `with refit.reading()` before the refit after the next, and none calls push "
            "or pull in it"
        )

    def _check_unchanged(self, before: Mapping[str, bytes] | None) -> None:
        """Raise if a source changed during a background push."""
        after = _sample(self._movers[0].sources()) if before else {}
        changed = [name for name, lines in (before or {}).items() if after.get(name) != lines]
        if changed:
            raise VerificationError(
                f"{len(changed)} sources of rank {self.comm.rank} were changed while they were pushed in the "
                f"background, {changed[0]} among them: they belong to the push until its work is done; version "
                f"{self.version} stays"
            )

    def _version_of_all(
        self, what: str, version: int | None, pushes: bool, error: Exception | None, in_background: bool
    ) -> tuple[int, bool, bool]:
        """Return the version pushed, whether any rank is in the background, and whether all hold the one before."""
        number = _NONE
        try:
            if version is not None or pushes:
                number = version_number(version)
        except PlanError as caught:
            error = error or caught
        sends = pushes and self._serves_sources
        held = 0 if self._changes is None else self._changes.follows
        said = np.array([number, pushes, sends, error is not None, in_background, held], np.int64)
        rows: list[list[int]] = [row.tolist() for row in share(self.comm.control, said, what)]
        if any(row[3] for row in rows):
            with collective_step(self.comm, "Refit") as step:
                step.error = error
        pushed = {number for number, pushes, *_ in rows if pushes}
        wanted = {number for number, *_ in rows if number != _NONE}
        # What follows is the same on all ranks.
        if not pushed:
            raise MismatchError(
                "Refit: a version is pushed by the ranks that have sources, and every rank has called pull; call "
                "push(version) on those with sources"
            )
        if len(pushed) != 1 or wanted != pushed:
            raise MismatchError(
                f"Refit: one version is pushed and every rank takes it: pushed {sorted(pushed)}, asked for "
                f"{sorted(wanted)}"
            )
        if not any(row[2] for row in rows):
            raise PlanError(
                f"Refit: a version is pushed by ranks that have sources, but version {min(pushed)} is pushed by ranks "
                f"{[rank for rank, row in enumerate(rows) if row[1]]}, which have none: they pull"
            )
        follows = held > 0 and all(row[5] == held for row in rows)
        return pushed.pop(), any(row[4] for row in rows), follows

    def _switch(self, target: int, number: int) -> None:
        with self._reading:
            self._now = _Served(target, number)

    # ---- life

    def close(self) -> None:
        """Wait for a version that is under way, and let go of arrays and staging; `weights` stay readable.

        Collective: all ranks of the communicator call this. Closing twice is safe.

        Raises:
            LowshardError: an error of a version in the background that no call has raised yet.
        """
        if self._closed:
            return
        error = self._background.settle()
        self._closed = True
        if self._changes is not None:
            self._changes.close()
        for mover in self._movers:
            mover.close()
        with contextlib.suppress(CommError):  # after a rank's death the process's end does it
            self._background.close()
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        # The other ranks may not come here, and what is under way has a deadline of its own.
        self._closed = True
        self.comm.__exit__(type(error), error, None)


def _twins(comm: Communicator, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays like these with the same content, in memory that peers can write."""
    wrong = next((a for a in arrays.values() if not isinstance(a, np.ndarray) and not is_gpu(a)), None)
    if wrong is not None:
        raise PlanError(
            f"destinations are arrays, got {type(wrong).__name__}; a transform has what it quantises"
        )

    def make(array: Array) -> Array:
        made = comm.empty(tuple(array.shape), array.dtype)
        made[...] = array
        return made

    try:
        with comm.meeting("Refit"):
            return twins_of(arrays, make)
    except (MemoryError, OSError) as error:
        raise CommError(
            f"there is no memory for a second set of destinations ({error}); refit with buffering='in_place'"
        ) from error


def _sample(arrays: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a cache line of each 64 KiB, at least 64 lines, of each array of host memory, by name."""
    found = {}
    for name, array in arrays.items():
        if isinstance(array, np.ndarray) and array.flags.c_contiguous and array.nbytes:
            data = array.reshape(-1).view(np.uint8)
            step = max(_LINE_BYTES, min(_STEP_BYTES, data.size // _FEW_LINES))
            whole = data[: data.size // step * step].reshape(-1, step)
            found[name] = whole[:, :_LINE_BYTES].tobytes() + data[-_LINE_BYTES:].tobytes()
    return found


class Vote:
    """Commit or abort of each attempt, decided once: survivors on one host always decide alike, through a shared word.

    All ranks have agreed that they are ready before any asks for a commit; a rank that notices a failure asks for an
    abort. The first to ask decides. There is one vote a communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self._reach = comm.control.reach
        self._word = self._reach.word if len(self._reach.peers) > 1 else None
        if self._word is not None:
            from lowshard.reshard.atomic_word import compare_swap

            self._swap = compare_swap()
            self._at = int(self._word.ctypes.data)

    @property
    def shared(self) -> bool:
        """Whether the ranks of a host share one word."""
        return self._word is not None

    def decide(self, attempt: int, commit: bool) -> bool:
        """Ask for a commit or an abort of an attempt (1, 2, ...); return whether it is committed."""
        mine = _COMMIT if commit else _ABORT
        if self._word is None:
            return commit
        while True:
            held = int(self._word[0])
            if held // 4 >= attempt:
                return held % 4 == _COMMIT
            self._swap(self._at, held, attempt * 4 + mine)


def version_number(version: object) -> int:
    """Return a version as a Python integer."""
    try:
        number = -1 if isinstance(version, (bool, np.bool_)) else index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise PlanError(f"a version is an integer from 0 to 2^63 - 1, got {version!r}")
    return number
