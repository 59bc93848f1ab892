"""Opens units: gathers their whole parameters into buffers, ahead of their use, and frees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from lowshard import dtypes
from lowshard.comm.work import Work
from lowshard.errors import NotOpen, OpenLimit, StaleParams
from lowshard.fsdp.fsdp_strategy import MXFP8
from lowshard.fsdp.groups import Groups
from lowshard.fsdp.step_buffer import Pool
from lowshard.fsdp.step_report import Log
from lowshard.fsdp.unit_layout import Segment, Shape, UnitPlan
from lowshard.kernels import MXFP8Tensor, cast, dequantize_mxfp8, quantize_mxfp8

Array = Any  # a NumPy or CuPy array; CuPy ships no types
_OPENS_KEPT = 1 << 16
Phase = Literal["forward", "backward"]


@dataclass
class Opened:
    """The whole parameters of one unit."""

    slot: int | None = None  # which of the shared buffers holds them
    work: Work | None = None  # the gather that fills it, until it was waited for
    uses: int = 0  # how often it is open: by its own name and by units tied to it
    prefetched: bool = False  # gathered before it was asked for
    fresh: bool = False  # of buffers that are kept: they hold the parameters as they are
    stale: bool = False  # where parameters rest whole: others' parts are those before the last update


class Opener:
    """Opens and closes units; prefetches the next ones by the order of calls, which is the same on all ranks."""

    def __init__(
        self, shape: Shape, pool: Pool, groups: Groups, log: Log, open_limit: int, prefetch: int, poison: bool
    ) -> None:  # fmt: skip
        self._shape, self._pool, self._groups, self._log = shape, pool, groups, log
        self._limit, self._prefetch, self._poison = open_limit, prefetch, poison
        self._units = {unit.name: unit for unit in shape.model.units}
        self._order = [unit.name for unit in shape.model.units]
        self._holders: list[str | None] = [None] * shape.open_slots
        self.state = {name: Opened() for name in self._units}
        self._views: dict[tuple[str, int | None], Mapping[str, Array]] = {}
        self._seen: list[tuple[str, str]] = []  # opens of this step
        self._last: list[tuple[str, str]] = []  # and of the last one
        self._shards = {name: self._own_parts(unit) for name, unit in self._units.items()}

    # ---- what the caller does

    def open(self, name: str, phase: Phase) -> Mapping[str, Array]:
        """Return the unit's parameters as views, gathered."""
        unit, state = self._units[name], self.state[name]
        if state.stale:
            raise StaleParams(
                f"unit {name!r}: update() changed this rank's part of parameters that rest whole on every rank, and "
                "the other parts are still the old ones; call broadcast_updated_params() after update()"
            )
        for other in unit.foreign:
            if self.state[other].stale:
                raise StaleParams(
                    f"unit {name!r} is tied to {other!r}, which was updated; call broadcast_updated_params()"
                )
        if state.uses == 0 and not self._shape.keeps and not self._shape.rests_whole(unit):
            wanted = {name, *unit.foreign}
            already = {other for other in self._holders if other is not None and self.state[other].uses}
            if len(already | wanted) > len(self._holders) or len(already | {name}) > self._limit:
                raise OpenLimit(
                    f"open_limit={self._limit} units are open at a time; {', '.join(sorted(already))} are, so "
                    f"{name!r} cannot be: close one first, or make the model with a larger open_limit"
                )
        for other in (name, *unit.foreign):
            self._start(other, keep={name, *unit.foreign})
            self.state[other].uses += 1
            self.state[other].prefetched = False
        for other in (name, *unit.foreign):
            self._wait(other)
        self._log.note("open", name)
        if len(self._seen) < _OPENS_KEPT:
            self._seen.append((name, phase))
        self._gather_ahead()
        return self.views(name)

    def close(self, name: str) -> None:
        """Close a unit."""
        unit, state = self._units[name], self.state[name]
        if not state.uses:
            raise NotOpen(f"close({name!r}): the unit is not open; open it first")
        self._log.note("close", name)
        for other in (name, *unit.foreign):
            self._release(other)
        self._gather_ahead(only=name)

    def is_open(self, name: str) -> bool:
        """Return whether a unit is open."""
        return self.state[name].uses > 0

    def views(self, name: str) -> Mapping[str, Array]:
        """Return the views of an open unit; the same objects while its buffer is the same."""
        unit, own = self._units[name], self._own_views(name)
        if not unit.foreign:
            return own
        # Units that these are tied to in turn are not open: of each no more than its own parameters.
        tied = {tied: self._own_views(other)[target] for tied, other, target in unit.ties if other != name}
        return MappingProxyType({**own, **tied})

    def _own_views(self, name: str) -> Mapping[str, Array]:
        unit, state = self._units[name], self.state[name]
        key = (name, state.slot)
        found = self._views.get(key)
        if found is None:
            made = dict(unit.views(self._whole(unit)))
            for param in unit.ignored:
                made[param.name] = self.ignored(unit, param.name)
            found = self._views[key] = MappingProxyType(made)
        return found

    def ignored(self, unit: UnitPlan, name: str) -> Array:
        """Return a parameter that every rank holds whole."""
        param = next(p for p in unit.ignored if p.name == name)
        part = self._pool.part(f"ignored:{unit.name}.{name}", unit.formats.compute, param.elems)
        return part.reshape(param.shape)

    def shard(self, name: str, segment: Segment) -> Array:
        """Return this rank's part of a segment, 1-D, in the master dtype."""
        return self._shards[name][self._units[name].segments.index(segment)]

    # ---- around updates

    def begin_step(self) -> None:
        """Begin a step: its opens are compared with those of the last one."""
        if self._seen:
            self._last, self._seen = self._seen, []

    def updated(self, names: list[str]) -> None:
        """Note that parameters have changed: gathered copies are invalid."""
        self.mark_updated(names)
        for name in names:
            unit, state = self._units[name], self.state[name]
            if state.uses and not self._shape.rests_whole(unit) and not state.stale:
                state.work = self._gather(unit)  # it is open: its views are to show what is
                self._wait(name)
        self.drop_prefetched()

    def mark_updated(self, names: list[str]) -> None:
        """Note that parameters have changed, without communication."""
        for name in names:
            state = self.state[name]
            state.fresh = False
            state.stale |= self._shape.resident and self._shape.grid.shards > 1

    def gather_stale(self) -> None:
        """Gather resident parameters that are stale."""
        works = []
        for name in self._order:
            state = self.state[name]
            if state.stale:
                works.append(self._gather(self._units[name]))
                state.fresh = True
        for work in works:
            work.wait()
        for state in self.state.values():
            state.stale = False

    def drop_prefetched(self) -> None:
        """Free the buffers of units that were prefetched and are not open."""
        for slot, name in enumerate(self._holders):
            if name is not None and not self.state[name].uses:
                self._drop(slot)
        for state in self.state.values():
            if state.prefetched and not state.uses:
                state.prefetched, state.work, state.fresh = False, None, False

    def reset(self) -> None:
        """Close everything."""
        for state in self.state.values():
            state.uses, state.work, state.prefetched, state.fresh, state.slot = 0, None, False, False, None
        self._holders = [None] * len(self._holders)
        self._seen, self._last = [], []  # ranks may have come to different places in the step that failed

    # ---- gathers

    def _own_parts(self, unit: UnitPlan) -> list[Array]:
        parts, at = [], 0
        item, master = unit.formats.item("master"), unit.formats.master
        rank = self._shape.grid.shard_rank
        for segment in unit.segments:
            n = segment.plan.shard_elems
            if self._shape.rests_whole(unit):
                first = segment.start + rank * n
            else:
                first, at = at, at + n
            parts.append(self._pool.part(f"master:{unit.name}", master, n, first * item))
        return parts

    def _whole(self, unit: UnitPlan) -> Array:
        if self._shape.rests_whole(unit):
            return self._pool.part(f"master:{unit.name}", unit.formats.master, unit.elems)
        slot = self.state[unit.name].slot
        name = f"open:{unit.name}" if self._shape.keeps else f"open#{slot}"
        return self._pool.part(name, unit.formats.compute, unit.elems)

    def _start(self, name: str, keep: set[str]) -> bool:
        """Start the gather of a unit if needed; return whether there was a buffer."""
        unit, state = self._units[name], self.state[name]
        if self._shape.rests_whole(unit) or state.work is not None or state.fresh:
            return True
        if not self._shape.keeps:
            if state.slot is not None:
                return True
            state.slot = self._slot(keep)
            if state.slot is None:
                return False
            self._holders[state.slot] = name
        state.work = self._gather(unit)
        return True

    def _slot(self, keep: set[str]) -> int | None:
        """Return a free buffer, or that of the unit prefetched last; None if all are in use."""
        if None in self._holders:
            return self._holders.index(None)
        for slot, name in reversed(list(enumerate(self._holders))):
            assert name is not None
            if not self.state[name].uses and name not in keep:
                self._drop(slot)
                return slot
        return None

    def _drop(self, slot: int) -> None:
        name = self._holders[slot]
        if name is not None:
            state = self.state[name]
            self._log.unused_gathers += state.prefetched
            state.slot, state.work, state.prefetched = None, None, False
            self._holders[slot] = None

    def _wait(self, name: str) -> None:
        state = self.state[name]
        if state.work is None:
            return
        work, state.work = state.work, None
        self._log.wait(work, name)
        state.fresh = self._shape.keeps

    def _release(self, name: str) -> None:
        unit, state = self._units[name], self.state[name]
        state.uses -= 1
        if state.uses or self._shape.keeps or self._shape.rests_whole(unit):
            return
        slot = state.slot
        assert slot is not None
        if self._poison:
            self._whole(unit).view("uint8")[...] = 0xFF  # NaN in every float dtype
        self._drop(slot)

    def _gather_ahead(self, only: str | None = None) -> None:
        """Start the gathers of the next units; `only`: of the one just closed, if it is next."""
        for name in self._next():
            state = self.state[name]
            if only is not None and name != only:
                break
            if state.uses or state.work is not None or state.slot is not None or state.fresh:
                continue
            if self._shape.rests_whole(self._units[name]):
                continue
            if not self._shape.keeps and None not in self._holders:
                break
            if self._start(name, keep=set()):
                state.prefetched = True

    def _next(self) -> list[str]:
        """Return the units to prefetch."""
        n = len(self._seen)
        if self._last[:n] == self._seen:
            return [name for name, _ in self._last[n : n + self._prefetch]]
        if not self._seen:
            return []
        name, phase = self._seen[-1]
        at = self._order.index(name)
        order = self._order[at + 1 :] if phase == "forward" else self._order[:at][::-1]
        return order[: self._prefetch]

    def _gather(self, unit: UnitPlan) -> Work:
        self._log.gathers[unit.name] += 1
        whole = self._whole(unit)

        def job() -> None:
            self._log.note("gather start", unit.name)
            for segment, shard in zip(unit.segments, self._shards[unit.name], strict=True):
                self._gather_segment(unit, segment, shard, whole[segment.start : segment.stop])
            self._log.note("gather end", unit.name)

        return self._groups.gather_queue.submit(job, f"the gather of unit {unit.name!r}")

    def _gather_segment(self, unit: UnitPlan, segment: Segment, shard: Array, whole: Array) -> None:
        formats, channel, text = unit.formats, self._groups.shard, f"the gather of unit {unit.name!r}"
        n, rank, shards = segment.plan.shard_elems, self._shape.grid.shard_rank, self._shape.grid.shards
        if formats.wire == MXFP8:
            each = MXFP8Tensor.buffer_bytes((n,))
            wire = self._pool.part("wire", "uint8", shards * each)
            quantize_mxfp8(shard, out=MXFP8Tensor.over(wire[rank * each : (rank + 1) * each], (n,)))
            if channel is not None:
                channel.call(text, "gather", "all_gather", wire[rank * each : (rank + 1) * each], wire)
            for r in range(shards):
                codes = MXFP8Tensor.over(wire[r * each : (r + 1) * each], (n,))
                dequantize_mxfp8(codes, formats.compute, whole[r * n : (r + 1) * n])
            self._log.copied_bytes += each + whole.nbytes
            return
        target = whole
        if formats.wire != formats.compute:
            target = self._pool.part("wire", formats.wire, segment.plan.size)
        own = shard
        if formats.wire != formats.master:
            own = target[rank * n : (rank + 1) * n]
            convert(shard, own)
            self._log.copied_bytes += own.nbytes
        if channel is not None:
            channel.call(text, "gather", "all_gather", own, target)
        elif own is shard:
            target[...] = shard
            self._log.copied_bytes += target.nbytes
        if target is not whole:
            convert(target, whole)
            self._log.copied_bytes += whole.nbytes


def convert(src: Array, dst: Array) -> None:
    """Write an array in another float dtype, rounded to nearest."""
    names = {dtypes.get(array.dtype).name for array in (src, dst)}
    if len(names) == 1 or "float64" in names:
        dst[...] = src
    else:
        cast(src, dst.dtype, dst)
