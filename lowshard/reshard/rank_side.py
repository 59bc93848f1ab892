"""One rank's arrays in a reshard, checked, and the items that the mover moves, agreed on between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import kind_of
from lowshard.box import full_box, shape_of, slices_of
from lowshard.comm.agreement import collective_step, trade
from lowshard.comm.communicator import Communicator
from lowshard.errors import BufferMismatchError, MeshError, MismatchError
from lowshard.foreign_array import READ_ONLY, view_of
from lowshard.kernels.buffer import require_results_apart
from lowshard.kernels.mxfp8 import FLOATS
from lowshard.reshard.mxfp8_transform import ensure_sendable
from lowshard.reshard.reshard_plan import Entry, Move, RankPlan, ReshardPlan
from lowshard.transfer.conversion import Conversion
from lowshard.transfer.item import Format, Item, bytes_of
from lowshard.transfer.spans import box_span
from lowshard.transfer.transform_contract import CastTransform, ReshardTransform, arrays_of, memory_of

Array = Any


class Side:
    """One rank's arrays and items of a reshard."""

    sends: dict[int, list[Item]]
    receives: dict[int, list[Item]]
    copies: list[Item]

    def __init__(
        self,
        plan: ReshardPlan,
        src: Mapping[str, Any] | None,
        dst: Mapping[str, Any] | None,
        comm: Communicator,
        transform: ReshardTransform | None,
    ) -> None:
        self.plan, self.comm = plan, comm
        self._transform = transform
        self._cast = transform if isinstance(transform, CastTransform) else None
        self._src: dict[int, Array] = {}
        self._dst: dict[int, Array] = {}
        self._given: tuple[Mapping[str, Any], ...] = tuple(
            {name: view_of(a, str(name), writes) for name, a in (arrays or {}).items()}
            for arrays, writes in ((src, False), (dst, True))
        )
        bound = transform if self._cast is None else self._cast.into(self._given[1])
        self.conversion = None if bound is None else Conversion(bound, comm.xp)
        self.mine = RankPlan(comm.rank, {}, {}, ())
        self.quantised: list[int] = []  # numbers of sources that are quantised

    # ---- arrays

    def prepare(self) -> None:
        """Look up and check this rank's arrays."""
        comm, plan = self.comm, self.plan
        if comm.size < plan.world_size:
            raise MeshError(
                f"the plan has ranks up to {plan.world_size - 1}, but the communicator has {comm.size}; "
                f"start {plan.world_size} ranks, as `lowshard run -n {plan.world_size}` does"
            )
        for entry in plan.entries:
            require_cast(entry, self._transform)
        self.mine = plan.for_rank(comm.rank)
        sends = [m for found in self.mine.sends.values() for m in found]
        forwarded = {m.entry for m in sends if self._is_forwarded(m)}
        for number in sorted({m.entry for m in (*self.mine.copies, *sends) if not self._is_forwarded(m)}):
            self._look_up_source(number)
        for number, entry in enumerate(plan.entries):
            if comm.rank not in entry.dst:
                continue
            name = entry.dst_local_name(comm.rank)
            if self._transforms(name):
                if number in forwarded:
                    raise MismatchError(
                        f"{name}: a multicast plan hands arrays on, and a transform stores none"
                    )
                continue
            self._dst[number] = self._array(1, name, entry)
            if number in forwarded and self._is_cast(self._dst[number], entry):
                raise MismatchError(
                    f"{name}: a multicast plan hands on what was received; cast on the sender"
                )
        self._require_apart()

    def _require_apart(self) -> None:
        """Refuse destinations that share memory with one another or with sources, which peers read meanwhile."""
        rank, entries = self.comm.rank, self.plan.entries
        by_name = {e.dst_local_name(rank): n for n, e in enumerate(entries) if rank in e.dst}
        results = [*self._dst.items()]
        results += [(by_name[name], a) for name, a in memory_of(self._transform) if name in by_name]
        sources = [(n, a) for n, a in self._src.items() if n not in self.quantised]
        for n in self.quantised:
            sources += [(n, a) for a in arrays_of(self._given[0][entries[n].src_local_name(rank)])]
        stays = {
            m.entry for m in self.mine.copies if m.src_box == m.dst_box == full_box(self._src[m.entry].shape)
        }.difference(self.quantised)

        def may_share(number: int, other: int, is_source: bool) -> bool:
            """Return whether one source feeds both, or what is a source stays as it is."""
            a, b = entries[number], entries[other]
            if a.src_name != b.src_name:
                return False
            return number in stays if is_source else a.dst.tiles(rank) == b.dst.tiles(rank)

        require_results_apart(
            results, rank, may_share, sources, lambda number: entries[number].dst_local_name(rank)
        )

    def _look_up_source(self, entry: int) -> None:
        """Look up a source array; a quantised one is dequantised again."""
        e = self.plan.entries[entry]
        name = e.src_local_name(self.comm.rank)
        self._src[entry] = self._array(0, name, e)
        if self._src[entry] is not self._given[0].get(name) and entry not in self.quantised:
            self.quantised.append(entry)

    def _array(self, side: int, name: str, entry: Entry) -> Array:
        which = "destination" if side else "source"
        given = self._given[side].get(name)
        if given is None:
            raise BufferMismatchError(
                f"{name}: rank {self.comm.rank} has a part of this {which} tensor, but no such array was given"
            )
        layout = entry.dst if side else entry.src
        cell = layout.rank_map.position(self.comm.rank)[0]  # type: ignore[index]  # it has a part
        shape, filled = layout.partition.local_shape(cell), shape_of(layout.partition.filled(cell))
        row = dtypes.get(layout.dtype)
        array = given if side else ensure_sendable(given, row.name)
        xp = self.comm.xp
        eight = row.bits == 8 and xp is not np
        if not isinstance(array, xp.ndarray):
            raise BufferMismatchError(f"{name}: {which} is a {xp.__name__} array, got {kind_of(array)}")
        got = dtypes.get(array.dtype).name
        fits = array.dtype.isnative and (got == row.name or (eight and got == "uint8"))
        if self._cast is not None and array.dtype.isnative and {got, row.name} <= set(FLOATS):
            fits = fits or self._cast.dtype == (got if side else row.name)
        if tuple(array.shape) not in (shape, filled) or not fits:
            raise BufferMismatchError(
                f"{name}: rank {self.comm.rank} holds {row.name}{list(shape)} of this {which} tensor by the "
                f"plan, got {array.dtype}{list(array.shape)}"
            )
        if side and xp is np and not array.flags.writeable:
            raise BufferMismatchError(f"{name}: the destination {READ_ONLY}")
        return array

    def sources(self) -> dict[str, Array]:
        """Return the source arrays that are read while a version is moved, by name."""
        return {self.plan.entries[n].name: a for n, a in self._src.items() if n not in self.quantised}

    def targets(self) -> Mapping[int, Array]:
        """Return the destination arrays, by tensor."""
        return self._dst

    def published(self) -> list[Array | None]:
        """Return this rank's source arrays by tensor; None for those that peers do not read in place."""
        rank, found = self.comm.rank, []
        for n, entry in enumerate(self.plan.entries):
            array = self._src.get(n) if rank in entry.src else None
            shown = (
                array is not None
                and n not in self.quantised
                and array.flags.c_contiguous
                and not self._transforms(entry.src_local_name(rank))
                and not self._is_cast(array, entry)
            )
            found.append(array if shown else None)
        return found

    def refresh(self) -> None:
        """Dequantise quantised sources again."""
        for entry in self.quantised:
            self._look_up_source(entry)
        for item in (*self.copies, *(i for found in self.sends.values() for i in found)):
            if item.array in self.quantised and not item.is_forwarded:
                item.source = self._src[item.array]

    def close(self) -> None:
        """Drop the arrays."""
        self._src, self._dst, self._given, self.conversion = {}, {}, ({}, {}), None
        self.sends, self.receives, self.copies = {}, {}, []

    def _transforms(self, name: str) -> bool:
        return self._transform is not None and self._transform.should_transform(name)

    def _sent_dtype(self, entry: Entry) -> str:
        return (entry.dst if self._cast is not None and self._cast.convert_on_send else entry.src).dtype

    def _is_cast(self, array: Array, entry: Entry) -> bool:
        """Return whether what an array holds is sent, or comes, in another dtype."""
        return self._cast is not None and dtypes.get(array.dtype).name != self._sent_dtype(entry)

    def _is_forwarded(self, move: Move) -> bool:
        """Return whether a move's source is a destination array that multicast forwards."""
        if not self.plan.multicast:
            return False
        entry = self.plan.entries[move.entry]
        return move.src_rank not in entry.src and move.src_rank in entry.dst

    # ---- items: what travels for a move

    def make_items(self, step: collective_step) -> None:
        """Make the items, and compare for each pair of ranks how many arrays of which dtypes and shapes they move."""
        comm, size = self.comm, self.comm.size
        self.sends = {p: [self._item(m) for m in found] for p, found in self.mine.sends.items()}
        self.receives = {p: [self._item(m) for m in found] for p, found in self.mine.receives.items()}
        self.copies = [self._item(m) for m in self.mine.copies]
        if self.conversion is not None:
            for item in (*(i for found in self.sends.values() for i in found), *self.copies):
                self.conversion.expect(item)
        mine, theirs = np.zeros((2, size, 3), np.int64)
        for table, side, sends in ((mine, self.sends, True), (theirs, self.receives, False)):
            for peer, items in side.items():
                table[peer] = step.attempt(self._summary, items, sends) or 0
        said = trade(comm, mine, [3] * size, [3] * size).reshape(size, 3)
        for peer in range(size):
            if step.error is None and (said[peer] != theirs[peer]).any():
                step.error = MismatchError(
                    f"rank {peer} sends {said[peer][0]} arrays for {said[peer][1]} boxes to rank {comm.rank}, which "
                    f"makes room for {theirs[peer][0]} arrays for {theirs[peer][1]} boxes: prepare_send and "
                    "prepare_recv give the same number of arrays of the same dtypes and shapes; use one kind of "
                    "transform on both sides, or none on the sender for a receiver that takes what is sent as it is"
                )  # fmt: skip
        for item in self.copies:
            step.attempt(self._check_kept, item)

    def _item(self, move: Move) -> Item:
        entry, rank = self.plan.entries[move.entry], self.comm.rank
        src_name, dst_name = entry.src_local_name(move.src_rank), entry.dst_local_name(move.dst_rank)
        item = Item(
            move.id, entry.name, move.src_box, move.dst_box, self._sent_dtype(entry), src_name=src_name,
            dst_name=dst_name, array=move.entry, is_forwarded=self._is_forwarded(move),
        )  # fmt: skip
        if item.is_forwarded:
            position = entry.dst.rank_map.position(move.dst_rank)
            item.turn = 0 if position is None else position[1].bit_length()
        if move.src_rank == rank:
            item.source = (self._dst if item.is_forwarded else self._src).get(move.entry)
            item.is_cast = item.source is not None and self._is_cast(item.source, entry)
            item.makes = item.is_cast or (self._transforms(src_name) and not item.is_forwarded)
        elif not item.is_forwarded:
            shape = entry.src.local_shape(move.src_rank)
            assert shape is not None
            item.remote_span = box_span(slices_of(move.src_box), shape, entry.src.itemsize_bytes)
        if move.dst_rank == rank:
            item.target = self._dst.get(move.entry)
            item.stores = self._transforms(dst_name) or (
                item.target is not None and self._is_cast(item.target, entry)
            )
        return item

    def _send_format(self, item: Item) -> list[Format]:
        plain = [(item.dtype, shape_of(item.src_box))]
        if not item.makes:
            return plain
        assert self.conversion is not None
        self._refuse(item.src_name, item)
        item.is_plain = self.conversion.transform.travels_plain(item.src_name, item.dst_box)
        return plain if item.is_plain else self.conversion.sent_forms(item)

    def _recv_format(self, item: Item) -> list[Format]:
        plain = [(item.dtype, shape_of(item.dst_box))]
        if not item.stores:
            return plain
        assert self.conversion is not None
        self._refuse(item.dst_name, item)
        if self.conversion.transform.travels_plain(item.dst_name, item.dst_box):
            return plain
        return self.conversion.got_forms(item)

    def _refuse(self, name: str, item: Item) -> None:
        assert self._transform is not None
        refused = self._transform.check_refuses(name, item.dst_box)
        if refused:
            raise MismatchError(refused)

    def _check_kept(self, item: Item) -> None:
        item.sent, item.got = tuple(self._send_format(item)), tuple(self._recv_format(item))
        if [bytes_of(f) for f in item.sent] != [bytes_of(f) for f in item.got]:
            raise MismatchError(
                f"{item.name}: rank {self.comm.rank} prepares {list(item.sent)} to send itself and "
                f"{list(item.got)} to receive; prepare_send and prepare_recv give the same"
            )

    def _summary(self, items: Sequence[Item], sends: bool) -> tuple[int, int, int]:
        digest, arrays = hashlib.blake2b(digest_size=7), 0
        for item in items:
            forms = self._send_format(item) if sends else self._recv_format(item)
            if sends:
                item.sent = tuple(forms)
            else:
                item.got = tuple(forms)
            arrays += len(forms)
            digest.update(f"{item.number} {forms}".encode())
        return arrays, len(items), int.from_bytes(digest.digest(), "little")


def require_cast(entry: Entry, transform: object) -> None:
    """Raise PlanError if the sides of a tensor have two dtypes, and the transform does not give the second."""
    given = transform.dtype if isinstance(transform, CastTransform) else None
    if entry.src.dtype != entry.dst.dtype != given:
        raise entry.dtype_error(f"pass transform=CastTransform({entry.dst.dtype!r}) on every rank")
