"""Checkpoints of a sharded model, independent of the number of ranks; whole parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard import dtypes, reading
from lowshard.argument import brief, is_text
from lowshard.argument import path as check_path
from lowshard.box import split_interval
from lowshard.checkpoint import CheckpointReader
from lowshard.checkpoint.writer import check_turn, write_state
from lowshard.comm import collective_step, share_text
from lowshard.comm.work import Work
from lowshard.errors import CheckpointError
from lowshard.foreign_array import host_of
from lowshard.fsdp.flat_plan import Entry, FlatPlan
from lowshard.fsdp.groups import Groups
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Replicated, Sharded

if TYPE_CHECKING:
    from lowshard.fsdp.core import Core

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Run = Callable[[Callable[[], None], str], None]
Arrays = dict[str, dict[str, str]]
Numbers = dict[str, dict[str, Any]]

_KEY = "lowshard.fsdp"
_VERSION = 1


@dataclass(frozen=True)
class HeldPiece:
    """Flat elements lo to hi of a parameter, as this rank holds them."""

    lo: int
    hi: int
    param: Array
    state: Mapping[str, Array]


@dataclass(frozen=True)
class ShardState:
    """The state of one rank, by full parameter name; parameters it has no part of are left out.

    Attributes:
        pieces: by name.
        updates: how often the model was updated.
    """

    pieces: Mapping[str, HeldPiece]
    updates: int


def shard_state(engine: Core) -> ShardState:
    """Return this rank's state as views."""
    found = {}
    for name, unit, segment, piece, view in engine._held():
        state = {}
        if segment.trainable:
            slot = engine._slots[unit.name]
            state = {
                key: value[piece.shard_lo : piece.shard_hi]
                for key, value in slot.state.items()
                if getattr(value, "shape", None) == slot.param.shape
            }
        found[name] = HeldPiece(piece.param_lo, piece.param_hi, view, state)
    return ShardState(found, engine.updates)


def spans_of(plan: FlatPlan, name: str) -> list[tuple[int, int]]:
    """Return the flat elements of a parameter in each shard."""
    found = [(0, 0)] * plan.shards
    for rank in range(plan.shards):
        for piece in plan.pieces(rank):
            if piece.name == name:
                found[rank] = piece.param_lo, piece.param_hi
    return found


def gather_param(groups: Groups, run: Run, plan: FlatPlan, entry: Entry, shard: Array, whole: Array) -> None:
    """Gather one parameter from its shards into a flat array."""
    spans = spans_of(plan, entry.name)
    rank = groups.grid.shard_rank
    own = _own(plan, rank, entry.name, shard)
    channel = groups.shard
    if channel is None:
        whole[...] = own
        return
    counts, displs = [hi - lo for lo, hi in spans], [lo for lo, _ in spans]
    text = f"full({entry.name!r})"
    run(lambda: channel.call(text, "state", "all_gather_v", own, whole, counts, displs), text)


def _own(plan: FlatPlan, rank: int, name: str, shard: Array) -> Array:
    for piece in plan.pieces(rank):
        if piece.name == name:
            return shard[piece.shard_lo : piece.shard_hi]
    return shard[:0]


def save(engine: Core, path: Any, wait: bool) -> Work | None:
    """Write the file; see `FSDP.save`."""
    with collective_step(engine._world, "save") as step:
        check_turn(step, engine._world, wait)  # before what follows takes its time
        arrays, numbers = _slot_state(engine)
    _complete(engine, arrays, numbers)
    mesh = DeviceMesh((engine.grid.shards,), ("shard",))  # the first shard group: replicas hold the same
    tensors: dict[str, tuple[Layout, np.ndarray | None]] = {}
    writes = engine.grid.replica_rank == 0
    for unit in engine.plan.units:
        slot = engine._slots.get(unit.name)
        for segment in unit.segments:
            shard = engine._opener.shard(unit.name, segment)
            parts = {"": shard}
            if segment.trainable:
                assert slot is not None
                parts |= {f"/{key}": slot.state[key] for key in arrays[unit.name]}
            for entry in segment.plan.entries:
                for suffix, flat in parts.items():
                    name = f"{unit.name}.{entry.name}{suffix}"
                    layout, rows = _rows(engine, mesh, segment.plan, entry, flat, name)
                    tensors[name] = layout, host_of(rows) if writes else None
        for param in unit.ignored:
            layout = Layout(mesh, param.shape, unit.formats.compute, (Replicated(),))
            value = engine._opener.ignored(unit, param.name)
            value = value if wait else value.copy()  # the others are copies
            tensors[f"{unit.name}.{param.name}"] = layout, host_of(value) if writes else None
    names = {name: list(kept) for name, kept in arrays.items()}
    said = {"version": _VERSION, "updates": engine.updates, "arrays": names, "numbers": numbers}
    about = {_KEY: json.dumps(said, sort_keys=True)}
    return write_state(path, tensors, engine._world.control, about, wait=wait, is_copy=True)


def _slot_state(engine: Core) -> tuple[Arrays, Numbers]:
    """Return, by unit, the dtypes of its state arrays by name, and its numbers."""
    arrays: Arrays = {}
    numbers: Numbers = {}
    names = {f"{unit.name}.{param.name}" for unit in engine.plan.units for param in unit.ignored}
    for unit in engine.plan.units:
        names |= {f"{unit.name}.{entry.name}" for segment in unit.segments for entry in segment.plan.entries}
    for name, slot in engine._slots.items():
        like = {k: v for k, v in slot.state.items() if getattr(v, "shape", None) == slot.param.shape}
        arrays[name] = {k: dtypes.get(v.dtype).name for k, v in like.items()}
        rest = {k: v for k, v in slot.state.items() if k not in arrays[name]}
        for key, value in slot.state.items():
            if not isinstance(key, str) or (key in rest and not isinstance(value, (int, float, str, bool))):
                raise CheckpointError(
                    f"save: state {key!r} of unit {name!r} is neither an array like the parameters nor a number, or "
                    "its name is not a text"
                )
            if not is_text(key) or (
                key in rest and not _is_readable(value)
            ):  # a file that load refuses is lost
                raise CheckpointError(
                    f"save: state {brief(key)} of unit {name!r} is {brief(value)}, which a file cannot hold: numbers "
                    "are finite, integers fit 64 bits, and text is such that UTF-8 can write it"
                )
        numbers[name] = {"step": slot.step, "state": rest}
        trained = engine.plan.by_name[name].trained
        assert trained is not None
        for key in arrays[name]:
            for entry in trained.plan.entries:
                stored = f"{name}.{entry.name}/{key}"
                if stored in names:
                    raise CheckpointError(
                        f"save: every tensor of the file has a name of its own, and {stored!r} would be both the "
                        f"optimizer's {key!r} of {name}.{entry.name} and another tensor; give the parameter or the "
                        "state another name"
                    )
                names.add(stored)
    return arrays, numbers


def _complete(engine: Core, arrays: Arrays, numbers: Numbers) -> None:
    """Add the state of slots of which this rank holds no elements: zeros, and numbers."""
    order: dict[str, dict[str, str]] = {name: {} for name in arrays}
    texts = share_text(engine._world, json.dumps([arrays, numbers]))
    with collective_step(engine._world, "save"):
        _take_over(engine, arrays, numbers, order, texts)
    for name, keys in order.items():  # the same on all ranks
        arrays[name] = {key: arrays[name][key] for key in keys}


def _take_over(
    engine: Core, arrays: Arrays, numbers: Numbers, order: dict[str, dict[str, str]], texts: list[str]
) -> None:
    """Add what the other ranks keep of slots of which this one holds no elements."""
    for text in texts:
        their_arrays, their_numbers = json.loads(text)
        for name, slot in engine._slots.items():
            order[name] |= their_arrays[name]
            if not slot.pieces:
                numbers[name]["state"] = their_numbers[name]["state"] | numbers[name]["state"]
            for key, dtype in their_arrays[name].items():
                if key not in slot.state and not slot.pieces:
                    slot.state[key] = engine._groups.xp.zeros(slot.param.shape, dtypes.get(dtype).numpy)
                    arrays[name][key] = dtype
                elif arrays[name].get(key) != dtype:
                    raise CheckpointError(
                        f"save: state {key!r} of unit {name!r} is an array of {dtype} like the parameters on another "
                        f"rank, and {arrays[name].get(key, 'no such array')} here; a rule keeps the same arrays on all "
                        "ranks whose slot has pieces"
                    )


def _is_readable(value: float | str | bool) -> bool:
    """Return whether a number or text can be read back from a file's metadata."""
    if isinstance(value, str):
        return is_text(value)
    return -(1 << 63) <= value < 1 << 63 if isinstance(value, int) else math.isfinite(value)


def _rows(
    engine: Core, mesh: DeviceMesh, plan: FlatPlan, entry: Entry, flat: Array, name: str
) -> tuple[Layout, Array]:
    """Return a parameter sharded by rows over the shard group, as files are written."""
    dtype = dtypes.get(flat.dtype)
    shards, rank = plan.shards, engine.grid.shard_rank
    if not entry.shape:
        whole = engine._empty(1, dtype.name, f"{name!r}")
        gather_param(engine._groups, engine._in_queue, plan, entry, flat, whole)
        return Layout(mesh, (), dtype.name, (Replicated(),)), whole.reshape(())
    layout = Layout(mesh, entry.shape, dtype.name, (Sharded(0),))
    inner = entry.elems // entry.shape[0] if entry.shape[0] else 0
    rows = [split_interval((0, entry.shape[0]), shards, r) for r in range(shards)]
    wanted = [(lo * inner, hi * inner) for lo, hi in rows]
    held = spans_of(plan, entry.name)
    own = _own(plan, rank, entry.name, flat)
    channel = engine._groups.shard
    if channel is None:
        out = own.copy()
    else:
        out = engine._empty(wanted[rank][1] - wanted[rank][0], dtype.name, f"rows of {name!r}")
        send = [_overlap(held[rank], wanted[r], held[rank][0]) for r in range(shards)]
        recv = [_overlap(held[r], wanted[rank], wanted[rank][0]) for r in range(shards)]
        args = (own, *map(list, zip(*send, strict=True)), out, *map(list, zip(*recv, strict=True)))
        text = f"rows of {name!r}"
        engine._in_queue(lambda: channel.call(text, "state", "all_to_all_v", *args), text)
    return layout, out.reshape(layout.local_shape(rank))


def _overlap(a: tuple[int, int], b: tuple[int, int], origin: int) -> tuple[int, int]:
    """Return the length and the start, from an origin, of the overlap of two intervals."""
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    return (hi - lo, lo - origin) if lo < hi else (0, 0)


@reading.reader("state of FSDP.save", CheckpointError)
def _read_state(
    version: int,
    updates: int,
    arrays: Mapping[str, tuple[str, ...]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    if version != _VERSION:
        raise CheckpointError(f"this lowshard reads version {_VERSION} of FSDP.save, got {version}")
    slots = {name: _read_slot(slot) for name, slot in numbers.items()}
    return {"updates": updates, "arrays": arrays, "numbers": slots}


@reading.reader("state of an optimizer's slot", CheckpointError)
def _read_slot(step: int, state: Mapping[str, float | str | bool]) -> dict[str, Any]:
    return {"step": step, "state": dict(state)}


def load(engine: Core, path: Any) -> None:
    """Read the file; see `FSDP.load`."""
    engine._guarded(engine._grads.join)  # what is under way would be added after they were cleared
    with collective_step(engine._world, "load", path=path):
        file = check_path(path, "load takes the path of a file that save wrote", CheckpointError)
        with CheckpointReader(file) as reader:
            if _KEY not in reader.header.metadata:
                raise CheckpointError(
                    f"{path}: FSDP.save did not write this file: it has no optimizer state; give the parameters to "
                    "fill(), as CheckpointReader.read_box reads them"
                )
            said = _read_state.text(reader.header.metadata[_KEY], f"{path}: its metadata {_KEY!r}")
            found = _read(engine, reader, said)
    engine._grads.reset()
    for slot in engine._slots.values():
        slot.state.clear()
    for view, values in found:
        view[...] = engine._groups.xp.asarray(values)
    for name, slot in engine._slots.items():
        slot.step = said["numbers"][name]["step"]
        slot.state.update(said["numbers"][name]["state"])
        for key in said["arrays"][name]:  # also where this rank holds no element
            slot.state[key] = engine._groups.xp.zeros(slot.param.shape, said["dtypes"][name, key])
    for name, unit, segment, piece, _ in engine._held():
        if segment.trainable:
            for key in said["arrays"][unit.name]:
                values = said["read"][name, key]
                engine._slots[unit.name].state[key][piece.shard_lo : piece.shard_hi] = (
                    engine._groups.xp.asarray(values)
                )
    engine.updates, engine._is_mixed = said["updates"], False
    engine._parameters_changed()


def _read(engine: Core, reader: CheckpointReader, said: dict[str, Any]) -> list[tuple[Array, np.ndarray]]:
    """Read this rank's pieces; the model is not changed."""
    missing = [name for name in engine._slots if name not in said["numbers"] or name not in said["arrays"]]
    if missing:
        raise CheckpointError(_no_state(reader, f"the parameters of unit {missing[0]!r}"))
    found: list[tuple[Array, np.ndarray]] = []
    said["read"], said["dtypes"] = {}, {}
    for unit in engine.plan.units:  # all ranks find the same faults, whatever they hold
        for segment in unit.segments:
            for entry in segment.plan.entries:
                name = f"{unit.name}.{entry.name}"
                _check_entry(reader, name, entry.shape, unit.formats.master)
                for key in said["arrays"][unit.name] if segment.trainable else ():
                    if f"{name}/{key}" not in reader.header.tensors:
                        raise CheckpointError(_no_state(reader, name))
                    stored = dtypes.get(reader.header.entry(f"{name}/{key}").dtype)
                    dtype = said["dtypes"].setdefault((unit.name, key), stored.numpy)
                    _check_entry(reader, f"{name}/{key}", entry.shape, dtypes.get(dtype).name)
        for param in unit.ignored:
            _check_entry(reader, f"{unit.name}.{param.name}", param.shape, unit.formats.compute)
    for name, unit, segment, piece, view in engine._held():
        elems = segment.plan.by_name[piece.name].elems
        box = ((piece.param_lo, piece.param_hi),)
        found.append((view, reader.read_box(name, box, shape=(elems,))))
        if segment.trainable:
            for key in said["arrays"][unit.name]:
                said["read"][name, key] = reader.read_box(f"{name}/{key}", box, shape=(elems,))
    for unit in engine.plan.units:
        found += [
            (engine._opener.ignored(unit, p.name), reader.read_box(f"{unit.name}.{p.name}"))
            for p in unit.ignored
        ]
    return found


def _no_state(reader: CheckpointReader, what: str) -> str:
    return (
        f"{reader.header.path}: has no optimizer state of {what}: new, or not trainable when it was saved; to begin "
        "without optimizer state give the parameters to fill(), as CheckpointReader.read_box reads them"
    )


def _check_entry(reader: CheckpointReader, name: str, shape: tuple[int, ...], dtype: str) -> None:
    entry = reader.header.entry(name)
    if entry.shape != shape or dtypes.get(entry.dtype).name != dtype:
        raise CheckpointError(
            f"{reader.header.path}: {name} is {entry.dtype}{list(entry.shape)}, the model has {dtype}{list(shape)}"
        )
