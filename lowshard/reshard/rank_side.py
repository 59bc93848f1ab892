"""One rank's side of a reshard: its arrays, checked, and what travels for each box, agreed on with the other side."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, full_box, shape_of
from lowshard.comm.agreement import agree
from lowshard.comm.protocol import Communicator
from lowshard.errors import BufferMismatchError, LowshardError, MeshError, MismatchError, VerificationError
from lowshard.foreign_array import READ_ONLY, view_of
from lowshard.kernels import cast
from lowshard.kernels.buffer import address
from lowshard.reshard.mxfp8_transform import ensure_sendable
from lowshard.reshard.reshard_plan import Entry, Move, RankPlan, ReshardPlan
from lowshard.reshard.transform_contract import ReshardTransform

Array = Any
Format = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array that travels."""
Key = tuple[int, Box, bool]


class Side:
    """What a rank holds of a reshard, before anything is laid out. Errors are kept until all ranks can raise them."""

    plan: ReshardPlan
    comm: Communicator
    transform: ReshardTransform | None

    def __init__(
        self,
        plan: ReshardPlan,
        src: Mapping[str, Any] | None,
        dst: Mapping[str, Any] | None,
        comm: Communicator,
        transform: ReshardTransform | None,
    ) -> None:
        self.plan, self.comm, self.transform = plan, comm, transform
        self._src: dict[int, Array] = {}
        self._dst: dict[int, Array] = {}
        self._mine = RankPlan(comm.rank, {}, {}, ())
        self._quantised: list[int] = []
        self._error: LowshardError | None = None
        self._given = tuple(
            {name: self._guard(view_of, a, str(name)) for name, a in (arrays or {}).items()}
            for arrays in (src, dst)
        )
        self._kept: dict[Key, list[Array]] = {}
        self._pending: dict[Key, int] = {}
        self._rooms: dict[int, list[Array]] = {}
        self._uses: dict[Key, int] = {}
        self._formats: dict[tuple[int, bool], list[Format]] = {}

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
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

    # ---- arrays

    def _prepare(self) -> None:
        comm, plan = self.comm, self.plan
        if comm.size < plan.world_size:
            raise MeshError(
                f"the plan has ranks up to {plan.world_size - 1}, the communicator {comm.size} ranks; start "
                f"{plan.world_size}"
            )
        self._mine = plan.for_rank(comm.rank)
        sending = {m.entry for m in self._mine.copies}
        sending |= {m.entry for found in self._mine.sends.values() for m in found if not self._handed(m)}
        for number in sorted(sending):
            self._refresh(number)
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
        self._require_apart()

    def _require_apart(self) -> None:
        """Refuse destinations that lie over sources: others read these while those are written."""
        whole = {
            m.entry for m in self._mine.copies if m.src_box == m.dst_box == full_box(self._src[m.entry].shape)
        }
        numbers = [n for n in self._src if n not in self._quantised]
        spans = np.array([_bounds(self._src[n]) for n in numbers], np.int64).reshape(-1, 2)
        for number, array in self._dst.items():
            begin, end = _bounds(array)
            for at in np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > begin)).tolist():
                if begin == end or (
                    numbers[at] == number and number in whole and (begin, end) == (*spans[at],)
                ):
                    continue  # nothing there, or it stays as it is
                raise BufferMismatchError(
                    f"{self.plan.entries[number].name}: on rank {self.comm.rank} its destination shares memory with "
                    f"the source of {self.plan.entries[numbers[at]].name}, which is read while the other is written; "
                    "give arrays of their own"
                )

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
                f"{name}: rank {self.comm.rank} holds {row.name}{list(shape or ())} of this {which} tensor by the "
                f"plan, got {got}{list(array.shape)}"
            )
        if side and xp is np and not array.flags.writeable:
            raise BufferMismatchError(f"{name}: the destination {READ_ONLY}")
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

    def _send_format(self, move: Move) -> list[Format]:
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

    def _recv_format(self, move: Move) -> list[Format]:
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
            self._rooms[move.id] = self._made_room(name, move)
            known = [(dtypes.get(a.dtype).name, tuple(a.shape)) for a in self._rooms[move.id]]
        return known

    def _shake_hands(self) -> None:
        """Compare what each pair of ranks will move: how many arrays, of what dtypes and shapes."""
        comm = self.comm
        for found in (*self._mine.sends.values(), self._mine.copies):
            for m in found:
                key = reuse_key(m)
                self._uses[key] = self._uses.get(key, 0) + 1
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
                    f"rank {peer} sends {said[peer][0]} arrays for {said[peer][1]} boxes to rank {comm.rank}, which "
                    f"makes room for {theirs[peer][0]} arrays for {theirs[peer][1]} boxes: prepare_send and "
                    "prepare_recv give the same number of arrays of the same dtypes and shapes; use one kind of "
                    "transform on both sides, or none on the sender for a receiver that takes what is sent as it is"
                )
        for move in self._mine.copies:
            if self._error is None:
                self._guard(self._check_copy, move)
        agree(comm, b"", self._take_error(), "execute_reshard_plan")

    def _check_copy(self, move: Move) -> None:
        send, recv = self._send_format(move), self._recv_format(move)
        self._formats[move.id, True] = send
        if [bytes_of(f) for f in send] != [bytes_of(f) for f in recv]:
            raise MismatchError(
                f"{self.plan.entries[move.entry].name}: rank {move.src_rank} prepares {send} to send itself and "
                f"{recv} to receive; prepare_send and prepare_recv give the same"
            )

    def _summary(self, found: Sequence[Move], is_send: bool) -> tuple[int, int, int]:
        digest, arrays = hashlib.blake2b(digest_size=7), 0
        for move in found:
            formats = self._send_format(move) if is_send else self._recv_format(move)
            self._formats[move.id, is_send] = formats
            arrays += len(formats)
            digest.update(f"{move.id} {formats}".encode())
        return arrays, len(found), int.from_bytes(digest.digest(), "little")

    def _is_prepared(self, move: Move) -> bool:
        """Say whether a move goes through a transform on this rank, so that it has arrays of its own."""
        entry = self.plan.entries[move.entry]
        rank = self.comm.rank
        sends = move.src_rank == rank and self._transforms(entry.src_local_name(rank))
        takes = move.dst_rank == rank and self._transforms(entry.dst_local_name(rank))
        return (sends and not self._handed(move)) or takes

    # ---- what transforms make and take

    def _prepared(self, move: Move) -> list[Array]:
        """Return what this rank sends for a move; made once for all who get the same."""
        key = reuse_key(move)
        found = self._kept.get(key)
        if found is None:
            entry = self.plan.entries[move.entry]
            name, source = entry.src_local_name(move.src_rank), self._source(move)
            assert self.transform is not None
            if not self._transforms(name) or self.transform.travels_plain(name, move.dst_box):
                part = source[slices_of(move.src_box)]
                found = [part if part.flags.c_contiguous else part.copy()]
            else:
                found = self.transform.prepare_send(name, slices_of(move.src_box), source)
                found = [view_of(a, name) for a in found]
                found = [a if a.flags.c_contiguous else a.copy() for a in found]
            self._kept[key] = found
            self._pending[key] = self._uses.get(key, 1)
        return found

    def _sent(self, move: Move) -> None:
        key = reuse_key(move)
        self._pending[key] = self._pending.get(key, 1) - 1
        if self._pending[key] <= 0:
            self._kept.pop(key, None)
            self._pending.pop(key, None)

    def _take_room(self, move: Move) -> list[Array]:
        """Return the arrays that the transform wants filled for a move."""
        found = self._rooms.pop(move.id, None)
        if found is not None:
            return found
        name = self.plan.entries[move.entry].dst_local_name(move.dst_rank)
        return self._made_room(name, move)

    def _made_room(self, name: str, move: Move) -> list[Array]:
        assert self.transform is not None
        return [view_of(a, name) for a in self.transform.prepare_recv(name, slices_of(move.dst_box))]

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
        self.transform.finalize_recv(name, slices_of(move.dst_box), wanted)

    @property
    def _in_place(self) -> bool:
        """Whether the transform reads and writes where things lie."""
        return self.transform is not None and self.transform.in_place and self.comm.xp is np

    def _makes_once(self, move: Move) -> bool:
        """Say whether what a transform makes for a move serves nobody else."""
        return self._uses.get(reuse_key(move), 1) == 1

    def _copy_transformed(self, move: Move) -> None:
        """Do a move within this rank that a transform takes part in."""
        entry = self.plan.entries[move.entry]
        name = entry.dst_local_name(move.dst_rank)
        if self._in_place and self._transforms(name) and self._makes_once(move):
            assert self.transform is not None
            values = self._source(move)[slices_of(move.src_box)]
            self.transform.recv_rows(name, slices_of(move.dst_box), [values])
            return
        if self._transforms(entry.src_local_name(move.src_rank)):
            came = self._prepared(move)
            self._sent(move)
        else:
            came = [self._source(move)[slices_of(move.src_box)]]
        if self._transforms(name):
            plain = len(came) == 1 and came[0].flags.c_contiguous
            wanted = self._take_room(move)
            self._finalize(move, wanted, came if plain or len(came) > 1 else [came[0].copy()])
            return
        self._dst[move.entry][slices_of(move.dst_box)] = came[0].reshape(shape_of(move.dst_box))


def _bounds(array: Array) -> tuple[int, int]:
    """Return the address of an array's first byte, and one more than that of its last; the same where it has none."""
    begin = end = address(array)
    if not array.size:
        return begin, end
    for n, stride in zip(array.shape, array.strides, strict=True):
        begin, end = begin + min(0, (n - 1) * stride), end + max(0, (n - 1) * stride)
    return begin, end + array.itemsize


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return a box as slices."""
    return tuple(slice(start, stop) for start, stop in box)


def bytes_of(form: Format) -> int:
    """Return the bytes of an array that travels."""
    return prod(form[1]) * dtypes.get(form[0]).itemsize_bytes


def reuse_key(move: Move) -> Key:
    """Return what is equal for moves that carry the same: replicas of a destination get one preparation."""
    return move.entry, move.src_box, bool(move.dst_box) and any(end % 32 for end in move.dst_box[-1])
