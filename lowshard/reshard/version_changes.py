"""What a refit sends where all receivers hold the version before: the elements that differ.

A group is what one rank sends another of one tensor: an encoded delta (`kernels.change_encoding`), or all of it where
that is smaller. A sender keeps a copy of what it sent last (the baseline), updated only when the version has been
switched to. A receiver with two sets of arrays keeps the last version's delta: the set written next is one version
behind, and the delta is applied to it while senders search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.box import Box, shape_of, slices_of, volume
from lowshard.comm.agreement import collective_step, trade
from lowshard.comm.communicator import Communicator
from lowshard.errors import CommError
from lowshard.kernels import cast
from lowshard.kernels.buffer import address, address_range
from lowshard.kernels.change_boxes import BoxUnits, ScratchBuffer
from lowshard.kernels.change_encoding import Changes, values_of
from lowshard.kernels.changes import ChangeBoxes
from lowshard.reshard.reshard_run import RefitCost, Report, Reshard
from lowshard.transfer.conversion import Conversion
from lowshard.transfer.item import Item
from lowshard.transfer.spans import BoxCopy
from lowshard.transfer.transform_contract import ReshardTransform

Array = Any

_ROW = 5
"""Header of a group: units of its encoding or _WHOLE, bytes of gaps and lengths, changed elements, bytes of steps."""
_WHOLE = -1
ROW_BYTES = 8 * _ROW
Units = tuple[int, int, int]
"""The unit of an encoding: elements of a block, bytes sent for one, and whether steps are allowed."""
_UNITS = 3
_LINE_BYTES = 64
_NO_UNITS: Units = 0, 0, 0
Decided = dict[int, npt.NDArray[np.int64]]
"""By peer, a header row for each group."""


class _Group:
    """One tensor's items between this rank and a peer, in the order they are sent."""

    def __init__(self, items: Sequence[Sequence[Item]]) -> None:
        self.items = items
        first = items[0][0]
        self.entry, self.name = first.array, first.name
        self.itemsize = dtypes.get(first.dtype).itemsize_bytes
        self.block_elems, self.unit_bytes = 0, 0
        self.by_steps = self.is_caught_up = False
        self.size_bytes = self.itemsize * sum(volume(item.dst_box) for item in items[0])
        self.send_boxes: ChangeBoxes | None = None
        self.receive_boxes: ChangeBoxes | None = None
        # raw: sent, before the transform; kept: received of the version before
        self.sent = self.raw = self.received = self.kept = Changes(0, 0, 0, None, 0)

    def set_units(self, block_elems: int, unit_bytes: int, by_steps: int) -> None:
        """Set the unit of its encodings."""
        self.block_elems, self.unit_bytes, self.by_steps = block_elems, unit_bytes, bool(by_steps)
        if block_elems:
            items = self.items[0]
            self.send_boxes = ChangeBoxes([i.src_box for i in items], self.itemsize, block_elems)
            self.receive_boxes = ChangeBoxes([i.dst_box for i in items], self.itemsize, block_elems)


class VersionChanges:
    """One rank's deltas, version after version."""

    def __init__(self, comm: Communicator, movers: Sequence[Reshard], always: bool) -> None:
        self._comm, self._movers, self._always = comm, movers, always
        self._scratch = ScratchBuffer()
        self._baseline: dict[int, Array] = {}
        """Copies of each tensor as receivers have it; a tensor that goes whole is copied and sent from the copy."""
        self._ahead: set[int] = set()
        """Tensors whose baseline is of a version that has not been switched to: they go whole."""
        sides = [mover.side for mover in movers]
        self._out = _groups([side.sends for side in sides])
        self._in = _groups([side.receives for side in sides])
        self._own = list(_groups([{comm.rank: side.copies} for side in sides]).get(comm.rank, ()))
        with collective_step(comm, "Refit", meets=True) as step:
            self._agree_on_units(step)
            step.attempt(self._remember)
        self.follows = 0
        """The attempt of the version this rank holds; 0 where the next version must come whole."""
        self._served = self._before = 0
        self._holds = [0] * len(movers)
        self._copies: dict[tuple[int, int, int], BoxCopy] = {}

    # ---- units of the encodings

    def _agree_on_units(self, step: collective_step) -> None:
        """Agree with each peer on the units of the encodings."""
        comm, size = self._comm, self._comm.size

        def asked_of(what: Callable[..., Units], *args: object) -> Units:
            return step.attempt(what, *args) or _NO_UNITS

        self._shared = _shared([mover.side.targets() for mover in self._movers])
        needs = {
            peer: np.array([asked_of(self._need, g) for g in groups]) for peer, groups in self._in.items()
        }
        counts_in = [_UNITS * len(self._in.get(r, ())) for r in range(size)]
        counts_out = [_UNITS * len(self._out.get(r, ())) for r in range(size)]
        asked = _split(trade(comm, _flat(needs, size), counts_in, counts_out), counts_out, _UNITS)
        answered: Decided = {}
        for peer, groups in self._out.items():
            answered[peer] = np.array(
                [asked_of(self._offer, g, *n) for g, n in zip(groups, asked[peer].tolist(), strict=True)]
            )
        received = _split(trade(comm, _flat(answered, size), counts_out, counts_in), counts_in, _UNITS)
        for groups_by, rows_by in ((self._out, answered), (self._in, received)):
            for peer, groups in groups_by.items():
                for group, row in zip(groups, rows_by[peer].tolist(), strict=True):
                    group.set_units(*row)
        for group in self._own:
            group.set_units(*asked_of(self._offer, group, *asked_of(self._need, group)))

    def _need(self, group: _Group) -> Units:
        """Return the unit in which this rank can receive a group."""
        first = group.items[0][0]
        if any(item.is_forwarded or item.turn for item in group.items[0]):
            return _NO_UNITS
        if not first.stores:
            return 1, group.itemsize, group.entry not in self._shared
        conversion = self._conversion(0)
        blocks = {conversion.transform.change_block_elems(i.dst_name, i.dst_box) for i in group.items[0]}
        block = blocks.pop() if len(blocks) == 1 else 0
        if not block:
            return _NO_UNITS
        return block, conversion.transform.change_block_bytes(first.dst_name, first.dtype), 0

    def _offer(self, group: _Group, block_elems: int, unit_bytes: int, by_steps: int) -> Units:
        """Return the unit in which this rank can send a group to such a receiver."""
        first, size = group.items[0][0], block_elems * group.itemsize
        if not block_elems or any(item.is_forwarded or item.turn for item in group.items[0]):
            return _NO_UNITS
        if block_elems > 1 and first.source.strides[-1:] != (group.itemsize,):
            return _NO_UNITS
        if first.target is not None:  # a local copy; an array that is its own source is left alone
            for items in group.items:
                begins, ends = zip(
                    address_range(items[0].source), address_range(items[0].target), strict=True
                )
                if max(begins) < min(ends):
                    return _NO_UNITS
        if first.makes and not first.is_cast:
            transform = self._conversion(0).transform
            blocks = {transform.change_block_elems(i.src_name, i.dst_box) for i in group.items[0]}
            size = transform.change_block_bytes(first.src_name, first.dtype)
            if blocks != {block_elems}:
                return _NO_UNITS
        return (block_elems, unit_bytes, by_steps) if size == unit_bytes else _NO_UNITS

    def _conversion(self, target: int) -> Conversion:
        found = self._movers[target].side.conversion
        assert found is not None
        return found

    def _sent_groups(self) -> list[_Group]:
        return [*(g for groups in self._out.values() for g in groups), *self._own]

    def _received_groups(self) -> list[_Group]:
        return [*(g for groups in self._in.values() for g in groups), *self._own]

    def _remember(self) -> None:
        try:
            for group in self._sent_groups():
                if group.send_boxes is not None and group.entry not in self._baseline:
                    self._baseline[group.entry] = self._empty_like(_as_sent(group.items[0][0]))
        except MemoryError as error:
            raise CommError(
                f"there is no memory for what was sent last ({error}); refit with delta='off'"
            ) from error

    def _empty_like(self, source: Array) -> Array:
        """Return an array like the source, with the same offset in a cache line, so that lines are compared."""
        if self._comm.xp is not np:
            return self._comm.xp.empty(source.shape, source.dtype)
        scratch = np.empty(source.nbytes + _LINE_BYTES, np.uint8)
        begin = (address(source) - address(scratch)) % _LINE_BYTES
        return scratch[begin : begin + source.nbytes].view(source.dtype).reshape(source.shape)

    # ---- a version

    def run(
        self, target: int, version: int, follows: bool, cost: RefitCost, mark_torn: Callable[[], object]
    ) -> Report:
        """Move a version; ends in an agreement that all have it."""
        comm, mover = self._comm, self._movers[target]

        def begin_to_write() -> None:
            self._holds[target] = 0
            if len(self._movers) == 1:
                self.follows = 0
            mark_torn()

        def finish() -> None:
            begin_to_write()
            with cost.phase("apply"):
                self._copy_missing(target)
                for group in self._received_groups():
                    if group.received.encoded is not None:
                        self._write(group, target, group.received)

        with cost.phase("find"), collective_step(comm, "Refit"):
            mover.side.refresh()
            self._catch_up(target, follows)
            self._find(target, follows)
        with cost.phase("tell"):
            decided = self._exchange_sizes()
            with collective_step(comm, "Refit"):
                sends, receives, copies = self._streams(target)
        if any(group.received.encoded is None for group in self._received_groups()):
            begin_to_write()
        with cost.phase("move"):
            report = mover.run_parts(version, sends, receives, copies, finish)
        cost.dense_bytes = mover.report.sent_bytes
        cost.sent_bytes = report.sent_bytes
        if follows:
            cost.changed_elems = sum(int(rows[:, 3].sum()) for rows in decided.values())
            cost.sent_bytes += sum(map(len, self._out.values())) * ROW_BYTES
        return report

    def _find(self, target: int, follows: bool) -> None:
        """Find what differs from the baseline, once for all peers that receive the same."""
        found: dict[object, tuple[Changes, Changes]] = {}
        for group in self._sent_groups():
            items, boxes = group.items[target], group.send_boxes
            if boxes is None:
                elems = sum(volume(item.src_box) for item in items)
                group.sent = group.raw = Changes(0, 0, 0, None, elems)
                continue
            key = group.entry, boxes.boxes, boxes.block_elems, group.by_steps
            if key not in found:
                raw = Changes(0, 0, 0, None, boxes.elems)
                if follows and group.entry not in self._ahead:
                    last = self._baseline[group.entry]
                    raw = boxes.find(
                        _as_sent(items[0]), last, self._scratch, not self._always, group.by_steps
                    )
                found[key] = raw, raw if raw.encoded is None else self._made(group, items[0], raw)
            group.raw, group.sent = found[key]
        for group in self._sent_groups():
            if group.sent.encoded is None and group.send_boxes is not None:
                self._ahead.add(group.entry)
                source = _as_sent(group.items[target][0])
                for box in group.send_boxes.boxes:
                    where = (*slices_of(box), ...)
                    self._baseline[group.entry][where] = source[where]

    def _made(self, group: _Group, item: Item, raw: Changes) -> Changes:
        """Return changes as they are sent: transformed, or with steps instead of values where those are shorter."""
        assert group.send_boxes is not None
        if not item.makes or item.is_cast or not raw.units or raw.encoded is None:
            return raw.shorter(group.send_boxes.unit_bytes)
        values = values_of(raw, group.send_boxes.unit_bytes)
        blocks = values.view(dtypes.get(item.dtype).numpy).reshape(raw.units, group.block_elems)
        made = self._conversion(0).transform.make_blocks(item.src_name, blocks)
        xp = self._comm.xp
        return raw._replace(encoded=xp.concatenate([made.reshape(-1), raw.encoded[values.size :]]))

    def _exchange_sizes(self) -> Decided:
        """Send receivers the headers of what is to come; return those that this rank sends."""
        size = self._comm.size
        mine = {
            peer: np.array([_row(g.sent) for g in groups], np.int64) for peer, groups in self._out.items()
        }
        counts = [_ROW * len(self._out.get(r, ())) for r in range(size)]
        counts_in = [_ROW * len(self._in.get(r, ())) for r in range(size)]
        received = _split(trade(self._comm, _flat(mine, size), counts, counts_in), counts_in, _ROW)
        for peer, groups in self._in.items():
            for group, row in zip(groups, received[peer].tolist(), strict=True):
                units, gaps, lengths, changed, steps = row
                group.received = Changes(max(0, units), gaps, lengths, None, changed, steps)
                if units != _WHOLE:  # its buffer is allocated when all have agreed
                    group.received = group.received._replace(encoded=np.empty(0, np.uint8))
        for group in self._own:
            group.received = group.sent
        return mine

    def _streams(self, target: int) -> tuple[dict[int, list[Item]], dict[int, list[Item]], list[Item]]:
        """Return the items to move: of groups that go whole, and the encodings of the others."""
        sends: dict[int, list[Item]] = {}
        receives: dict[int, list[Item]] = {}
        for peer, groups in self._out.items():
            for group in groups:
                encoded = group.sent.encoded
                sends.setdefault(peer, []).extend(
                    self._whole_items(group, target)
                    if encoded is None
                    else _encoded_item(group, encoded, None)
                )
        for peer, groups in self._in.items():
            for group in groups:
                if group.received.encoded is None:
                    receives.setdefault(peer, []).extend(self._whole_items(group, target))
                    continue
                encoded = self._comm.xp.empty(group.received.encoded_bytes(group.unit_bytes), np.uint8)
                group.received = group.received._replace(encoded=encoded)
                receives.setdefault(peer, []).extend(_encoded_item(group, None, encoded))
        own = [group for group in self._own if group.sent.encoded is None]
        return sends, receives, [item for group in own for item in self._whole_items(group, target)]

    def _whole_items(self, group: _Group, target: int) -> list[Item]:
        """Return the items of a group that goes whole; they are sent from the baseline."""
        items = group.items[target]
        if group.send_boxes is None:
            return list(items)
        last = None if items[0].source is None else self._baseline[group.entry]
        makes = items[0].makes and not items[0].is_cast
        return [replace(i, source=last, remote_span=None, makes=makes, is_cast=False) for i in items]

    # ---- applying a delta

    def _catch_up(self, target: int, follows: bool) -> None:
        """Apply the last version's delta to the set that is a version behind, while others still search."""
        if len(self._movers) == 1:
            return
        behind, self._holds[target] = (
            self._holds[target],
            0,
        )  # even if this fails: steps must be applied only once
        for group in self._received_groups():
            group.is_caught_up = (
                follows and behind > 0 and behind == self._before and group.kept.encoded is not None
            )
            if group.is_caught_up and group.kept.cost_in_copied_bytes < group.size_bytes:
                self._write(group, target, group.kept)
            elif group.is_caught_up:
                self._copy_from_served(group, target)

    def _copy_missing(self, target: int) -> None:
        """Copy the served set where the set to be written was not caught up."""
        if len(self._movers) == 1:
            return
        for group in self._received_groups():
            if group.received.encoded is not None and not group.is_caught_up:
                self._copy_from_served(group, target)

    def _copy_from_served(self, group: _Group, target: int) -> None:
        other = 1 - target
        items, theirs = group.items[target], group.items[other]
        if items[0].stores:
            transform, served = self._conversion(target).transform, self._conversion(other).transform
            for item in items:
                transform.take_over(item.dst_name, slices_of(item.dst_box), served)
            return
        key = id(group), target, 0
        copies = self._copies.get(key)
        source, to = theirs[0].target, items[0].target
        if copies is None:
            copies = self._copies[key] = BoxCopy(
                [item.target_span() for item in theirs], [item.target_span() for item in items],
                address(source), address(to),
            )  # fmt: skip
        copies.run(source, to)

    def _write(self, group: _Group, target: int, changes: Changes) -> None:
        items, boxes = group.items[target], group.receive_boxes
        assert boxes is not None
        if not items[0].stores:
            boxes.write(items[0].target, changes)
            return
        first = items[0]
        transform = self._conversion(target).transform
        store_changed_blocks(transform, first.dst_name, first.dtype, boxes, changes, group.unit_bytes)

    # ---- after the switch

    def commit(self, target: int, attempt: int) -> None:
        """Update the baselines and kept deltas: the version has been switched to."""
        self._before, self._holds[target] = self._served, attempt
        self.follows = 0
        nothing = Changes(0, 0, 0, None, 0)
        for group in self._received_groups():
            group.kept, group.received = group.received if len(self._movers) > 1 else nothing, nothing
        for group in self._sent_groups():
            if group.send_boxes is not None and group.raw.encoded is not None:
                group.send_boxes.write(self._baseline[group.entry], group.raw)
            group.sent = group.raw = nothing
        self._ahead.clear()
        self._scratch = ScratchBuffer()
        self.follows = self._served = attempt

    def close(self) -> None:
        """Drop what is kept."""
        self._out, self._in, self._own, self.follows, self._baseline = {}, {}, [], 0, {}


def _groups(streams: Sequence[Mapping[int, Sequence[Item]]]) -> dict[int, list[_Group]]:
    """Return the groups by peer, from the streams of each set of arrays."""
    found: dict[int, list[_Group]] = {}
    for peer in streams[0]:
        by_entry: dict[int, list[list[Item]]] = {}
        for number, stream in enumerate(streams):
            for item in stream[peer]:
                sets = by_entry.setdefault(item.array, [[] for _ in streams])
                sets[number].append(item)
        if by_entry:
            found[peer] = [_Group(sets) for sets in by_entry.values()]
    return found


def _shared(sets: Sequence[Mapping[int, Array]]) -> set[int]:
    """Return the tensors whose memory overlaps another's: they are written twice."""
    found: set[int] = set()
    for arrays in sets:
        last, most = -1, 0
        for begin, end, number in sorted((*address_range(a), n) for n, a in arrays.items()):
            if begin < min(end, most):
                found.update((last, number))
            if end > most:
                last, most = number, end
    return found


def _as_sent(item: Item) -> Array:
    """Return the array that an item is sent out of: a copy where it is cast on the way."""
    return cast(item.source, item.dtype) if item.is_cast else item.source


def _encoded_item(group: _Group, source: Array | None, target: Array | None) -> list[Item]:
    """Return the item of an encoding; none where it is empty."""
    encoded = source if target is None else target
    if encoded is None or not encoded.size:
        return []
    box, form = ((0, int(encoded.size)),), (("uint8", (int(encoded.size),)),)
    number = group.items[0][0].number
    return [Item(number, group.name, box, box, "uint8", source, target, sent=form, got=form)]


def _row(changes: Changes) -> list[int]:
    if changes.encoded is None:
        return [_WHOLE, 0, 0, changes.changed_elems, 0]
    numbers = changes.units, changes.gaps_bytes, changes.lengths_bytes, changes.changed_elems
    return [*numbers, changes.steps_bytes]


def _flat(by_peer: Decided, size: int) -> npt.NDArray[np.int64]:
    nothing = np.empty(0, np.int64)
    return np.concatenate([by_peer[r].reshape(-1) if r in by_peer else nothing for r in range(size)])


def _split(joined: npt.NDArray[np.int64], counts: Sequence[int], width: int) -> Decided:
    ends = [0, *accumulate(counts)]
    return {r: joined[ends[r] : ends[r + 1]].reshape(-1, width) for r, n in enumerate(counts) if n}


def store_changed_blocks(
    transform: ReshardTransform, name: str, dtype: str, boxes: BoxUnits, changes: Changes, unit_bytes: int
) -> None:
    """Have a transform store the blocks that differ."""
    places = boxes.places(changes, unit_bytes)
    came = values_of(changes, unit_bytes)
    first = 0
    for box in boxes.boxes:
        units = volume(box) // boxes.block_elems
        begin, end = np.searchsorted(places, (first, first + units))
        if begin < end:
            index = _index(box, boxes.block_elems, places[begin:end] - first)
            transform.store_blocks(name, dtype, index, came[begin:end])
        first += units


def _index(box: Box, block_elems: int, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the positions of blocks in the rank's array, a row of indices for each dim; the last counts blocks."""
    extents = shape_of(box)
    index = np.unravel_index(places, (*extents[:-1], extents[-1] // block_elems))
    begins = [start for start, _ in box]
    begins[-1] //= block_elems
    return tuple(i + begin for i, begin in zip(index, begins, strict=True))
