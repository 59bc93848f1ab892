"""Refit: serving weights that follow training weights, version by version, each whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self, Unpack, get_args

import numpy as np

from lowshard.comm.agreement import agree, share
from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Stream
from lowshard.errors import CommError, LowshardError, MismatchError, PlanError
from lowshard.foreign_array import like, view_of
from lowshard.reshard.published_tensors import version_number
from lowshard.reshard.reshard_plan import ReshardPlan
from lowshard.reshard.reshard_run import Report, Reshard, Settings, argument_error
from lowshard.reshard.vote import Vote
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any
Buffering = Literal["double", "in_place"]
_NONE = -1


class Refit:
    """Moves new versions of tensors from the ranks that train them to those that serve them.

    A version is switched to when all of it has arrived, its checksums agree, and all ranks have said so: prepare, vote,
    switch. With two sets of destination arrays ("double") the old version is served until then, and a refit that
    fails or is killed leaves it whole; the next one works. "in_place" writes into the arrays that are served, for half
    the memory: from the first byte to the switch they are `torn`, and so they stay where a refit fails.

    What is promised where a rank dies: `weights` of every survivor are one whole version, the old one or the new one,
    never a mix ("double"), and `version` says which. Survivors of one host are all on the same one, whenever the rank
    died, also where the communicator spans several hosts: they decide by a word in memory that they share. Survivors
    of different hosts, or of ranks that share no memory (`LOWSHARD_CPU_PATH=mpi`), may differ where the death falls
    between the last rank's vote and the switch, since a message about it may be lost with the rank that was to send
    it. So before ranks of several hosts serve together again they compare `version`, over a communicator of the
    survivors; where it differs the version is pushed again.

    Collective: all ranks of the communicator make it and close it; each version is one call on every rank: `push` where
    there are sources, `pull` elsewhere. Addresses, memory and open files stay as they are from the first call on.

    Args:
        plan: from `build_reshard_plan`, equal on every rank.
        comm: a communicator with every rank of the plan.
        src: this rank's source arrays by name; the same arrays serve every version.
        dst: its destination arrays, which hold version `version`.
        transform: what this rank's tensors go through.
        buffering: what becomes of the arrays of `dst`, and of what the transform stores into (the persistent buffers of
            `MXFP8ReshardTransform`). "double": a second set is made beside them, and versions take turns: the first
            goes to the second set, the next to the arrays that were given, and so on. So read `weights`, again after
            each refit, and not the arrays that were given. "in_place": every version is written into those.
        version: of what dst holds now, or None for nothing yet.
        settings: staging_bytes, checksums and way; see `Settings`. Here checksums are on by default: every piece that
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
        version: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.plan, self.comm, self.buffering = plan, comm, buffering
        self._version, self._torn, self._attempt = version, False, 0
        self._closed = False
        settings.setdefault("checksums", True)
        error: Exception | None = argument_error(plan, src, dst, transform, settings)
        sets: list[dict[str, Array]] = []
        served: list[dict[str, Any]] = []
        transforms = [transform]
        digest = b""
        try:
            if error is not None:
                raise error
            if not isinstance(buffering, str) or buffering not in get_args(Buffering):
                raise PlanError(f"buffering is 'double' or 'in_place', got {buffering!r}")
            if version is not None:
                self._version = version_number(version)
            given = dict(dst or {})
            sets.append({n: view_of(a, str(n)) for n, a in given.items()})
            served.append(given)
            if buffering == "double":
                sets.append({n: _twin(comm, a) for n, a in sets[0].items()})
                served.append({n: like(a, given[n]) for n, a in sets[1].items()})
                transforms.append(None if transform is None else transform.twin())
            served = [
                a if how is None else {**a, **how.refit_weights()}
                for a, how in zip(served, transforms, strict=True)
            ]
            digest = hashlib.blake2b(f"{plan.digest()} {buffering}".encode(), digest_size=16).digest()
        except Exception as caught:
            error = caught
        agree(comm, digest, error, "Refit")
        self._serves_sources = any(comm.rank in entry.src for entry in plan.entries)
        self._served, self._transforms = served, transforms
        self._live = 0
        self._movers: list[Reshard] = []
        for arrays, how in zip(sets, transforms, strict=True):
            first = self._movers[0] if self._movers else None
            mover = Reshard(plan, src, arrays, comm, how, like=first, **settings)
            self._movers.append(mover)
        self._vote = Vote(comm)

    # ---- what is served

    @property
    def version(self) -> int | None:
        """The version of `weights`, or None before the first."""
        return self._version

    @property
    def torn(self) -> bool:
        """Whether `weights` are a mix of versions: only "in_place", during a refit and after one that failed."""
        return self._torn

    @property
    def weights(self) -> Mapping[str, Any]:
        """What holds the version that is served, by name. Ask again after each refit.

        Destination arrays, those that were given or others of their library; for tensors that a transform stores, what
        it stores them in: an `MXFP8Tensor`, say.
        """
        return MappingProxyType(self._served[self._live])

    @property
    def transform(self) -> ReshardTransform | None:
        """The transform whose buffers hold the version that is served."""
        return self._transforms[self._live]

    # ---- a version

    def push(self, version: int, *, stream: Stream = None) -> Report:
        """Give the sources' present content as a version; on a rank that also serves, take it as well.

        Collective: every rank calls push or pull. Those that push name one version, and one of them has sources.

        Args:
            version: an integer from 0 to 2^63 - 1.
            stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one.

        Raises:
            PlanError: a version that is no integer from 0 to 2^63 - 1, or only ranks without sources push it; on all
                ranks, and nothing has changed.
            MismatchError: ranks push different versions, or one waits for another than is pushed; likewise.
            VerificationError: a checksum does not agree; the old version stays, on all ranks.
            PeerFailed: a rank died. `version` tells which one this rank serves, the same on all ranks of a host.
        """
        with self.comm.meeting("Refit.push", stream) as wrong:
            return self._refit(version, True, wrong)

    def pull(self, version: int | None = None, *, stream: Stream = None) -> Report:
        """Take the version that is pushed; with a number, that one and no other. Otherwise as `push`."""
        with self.comm.meeting("Refit.pull", stream) as wrong:
            return self._refit(version, False, wrong)

    def _refit(self, version: int | None, pushes: bool, wrong: LowshardError | None) -> Report:
        if self._closed:
            raise CommError("this Refit is closed; make a new one")
        number = self._agreed(version, pushes, wrong)
        self._attempt += 1
        target = 0 if self.buffering == "in_place" else 1 - self._live
        self._torn = self.buffering == "in_place"
        try:
            report = self._movers[target].run(number)  # ends in an agreement: all are ready, or all raise
        except CommError:
            # A rank died or did not come, perhaps after some have heard that all are ready.
            if self._vote.decide(self._attempt, False):
                self._switch(target, number)
            raise
        if self._vote.decide(self._attempt, True):
            self._switch(target, number)
            return report
        raise self._lost()

    def _agreed(self, version: int | None, pushes: bool, error: LowshardError | None) -> int:
        """Return the one version that is pushed, the same on all ranks, or raise on all of them."""
        number = _NONE
        try:
            if version is not None or pushes:
                number = version_number(version)
        except PlanError as caught:
            error = caught
        said = np.array([number, pushes, pushes and self._serves_sources, error is not None], np.int64)
        rows: list[list[int]] = [row.tolist() for row in share(self.comm.control, said)]
        pushed = {number for number, pushes, _, _ in rows if pushes}
        wanted = {number for number, _, _, _ in rows if number != _NONE}
        if not any(is_wrong for _, _, _, is_wrong in rows):
            if len(pushed) != 1 or wanted != pushed:
                error = MismatchError(
                    f"one version is pushed and every rank takes it: pushed {sorted(pushed)}, asked for "
                    f"{sorted(wanted)}"
                )
            elif not any(gives for _, _, gives, _ in rows):
                error = PlanError(
                    f"a version is pushed by ranks that have sources, but version {min(pushed)} is pushed by ranks "
                    f"{[rank for rank, row in enumerate(rows) if row[1]]}, which have none: they pull"
                )
        agree(self.comm, b"", error, "Refit")
        return pushed.pop()

    def _switch(self, target: int, number: int) -> None:
        self._live, self._version, self._torn = target, number, False

    def _lost(self) -> LowshardError:
        from lowshard.errors import PeerFailed

        return PeerFailed(
            f"another rank heard of a failure while version was voted on: version {self._version} stays"
        )

    # ---- life

    def close(self) -> None:
        """Let go of arrays and staging; `weights` stay readable. Closing twice is safe."""
        self._closed = True
        for mover in self._movers:
            mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _twin(comm: Communicator, array: Array) -> Array:
    """Return an array of the same form, where others can write it."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise PlanError(
            f"destinations are arrays, got {type(array).__name__}; a transform has what it quantises"
        )
    with comm.meeting("Refit"):
        try:
            made = comm.empty(tuple(array.shape), array.dtype)
        except (MemoryError, OSError) as error:
            raise CommError(
                f"there is no memory for a second set of destinations ({error}); refit with buffering='in_place'"
            ) from error
        made[...] = array
    return made
