"""`lowshard bench refit --model`: the refit of a whole model, dense and by what changed, beside what most stacks do."""

from __future__ import annotations

import argparse
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench.bench_device import HostDevice
from lowshard.bench.bench_meeting import timed
from lowshard.bench.bench_seat import Say, Seat
from lowshard.bench.memcpy import BesideMemcpy
from lowshard.bench.refit_rival import GatherAndBroadcast, TensorByTensor
from lowshard.errors import LowshardError, VerificationError
from lowshard.reading import reader

SAMPLE = "sample"
"""The model that is made up: of Llama's names, as large as --size says."""
SAMPLE_HIDDEN = 1024
LEAST_GAIN = 2.0
"""How many times as long gathering and broadcasting takes as a dense refit, at least: promised."""
_DENSE = "dense"
_SETS = 7
"""Destinations: two of each refit, one of the rivals, two of the copy; of sources two, with a delta's copy."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class WayRow(BesideMemcpy):
    """One way to bring a version, measured."""

    way: str
    changed: float
    sent_bytes: int
    least_bytes: int
    seconds: tuple[float, ...]
    memcpy_s: tuple[float, ...]
    pause_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class ModelSpec:
    """What is moved, from where to where."""

    shapes: Shapes
    heads: tuple[int | None, int | None]
    strategies: str
    trains: str
    serves: str
    together: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Return what `to_json` gave, after a way through JSON."""
        shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in data["shapes"].items()}
        return cls(**{**data, "shapes": shapes})

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSpec:
        """Return what the options name."""
        shapes: Shapes
        known: tuple[int | None, int | None]
        heads: tuple[int | None, int | None] = (args.heads, args.kv_heads)
        if args.model == SAMPLE:
            shapes, known = sample_shapes(args.size * 10**6), (16, 16)
        elif args.model.endswith(".json") and not args.model.endswith(".index.json"):
            shapes, known = _read_model.file(args.model)
        else:
            shapes, known = _of_checkpoint(Path(args.model))
        if heads[0] is None:
            heads = known
        return cls(shapes, heads, args.strategies, args.trains, args.serves, args.together)

    def tables(self) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Return the layouts of both sides by name, and the number of ranks."""
        from lowshard.weights.checkpoint_grid import Grid
        from lowshard.weights.name_pattern import NamePatterns, Sizes

        patterns, sizes = NamePatterns.load(self.strategies), Sizes(*self.heads)
        trains, serves = Grid.parse(self.trains), Grid.parse(self.serves)
        at = 0 if self.together else trains.num_ranks
        return (
            _layouts(trains.tilings(self.shapes, patterns, sizes), 0),
            _layouts(serves.tilings(self.shapes, patterns, sizes), at),
            max(trains.num_ranks, at + serves.num_ranks),
        )


def sample_shapes(size_bytes: int) -> Shapes:
    """Return a model of Llama's names and of about so many bytes, bf16: as many layers as fit, one at least."""
    hidden, inner = SAMPLE_HIDDEN, 3 * SAMPLE_HIDDEN
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
    }  # fmt: skip
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    return {
        f"model.layers.{i}.{name}.weight": ("bfloat16", shape)
        for i in range(max(1, round(size_bytes / layer_bytes)))
        for name, shape in layer.items()
    }


@dataclass(frozen=True)
class _ModelTensor:
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        dtypes.get(self.dtype)
        if min(self.shape, default=1) < 1:
            raise LowshardError(f"a tensor's extents are 1 or more, got {list(self.shape)}")


reader("tensor of a model to benchmark", LowshardError)(_ModelTensor)


@reader("model to benchmark", LowshardError)
def _read_model(
    tensors: Mapping[str, _ModelTensor],
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
) -> tuple[Shapes, tuple[int | None, int | None]]:
    if not tensors:
        raise LowshardError("a model has one tensor or more")
    shapes = {name: (dtypes.get(one.dtype).name, one.shape) for name, one in tensors.items()}
    return shapes, (num_attention_heads, num_key_value_heads)


def _of_checkpoint(path: Path) -> tuple[Shapes, tuple[int | None, int | None]]:
    """Return what the heads of a checkpoint's files say; no tensor is read."""
    from lowshard.checkpoint import Catalog
    from lowshard.weights.name_pattern import Sizes

    tensors = Catalog.open(path).tensors
    config = (path if path.is_dir() else path.parent) / "config.json"
    sizes = Sizes.from_config(config) if os.path.exists(config) else Sizes()
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return found, (sizes.num_heads, sizes.num_kv_heads)


def _layouts(tilings: Mapping[str, tuple[Any, Any]], offset: int) -> dict[str, Any]:
    from lowshard.reshard import TensorLayout

    return {n: TensorLayout.from_tiling(tiling).shifted(offset) for n, (tiling, _) in tilings.items()}


def measure_model(seat: Seat, request: Any) -> Any:
    """Measure every way; rows on rank 0. Collective: all ranks of the seat call this."""
    say = Say("refit", seat.meeting.rank == 0)
    with seat.open("auto") as place:
        measured = _Measured(place, request, say)
        rows = measured.rows()
    return rows if seat.meeting.rank == 0 else None


class _Measured:
    """One rank's arrays and the ways that move them."""

    def __init__(self, place: Any, request: Any, say: Callable[[str], object]) -> None:
        from lowshard.reshard import Refit, build_reshard_plan

        self._place, self._request, self._say = place, request, say
        self._comm, self._meeting = place.comm, place.meeting
        self._src, self._dst, size = ModelSpec.from_json(request["model"]).tables()
        if size != self._comm.size:
            raise LowshardError(f"these grids have {size} ranks, the job has {self._comm.size}")
        self._gets = self._local_bytes(self._dst)
        self._require_memory()
        self._plan = build_reshard_plan(self._src, self._dst)
        self._given = self._arrays(self._src, 1)
        self._rng = np.random.default_rng(request["seed"])
        self._copied = np.ones(self._gets, np.uint8), np.ones(self._gets, np.uint8)
        self._plain = self._arrays(self._dst, 0)
        self._refits = {
            delta: Refit(self._plan, self._comm, self._given, self._arrays(self._dst, 0), delta=delta)
            for delta in ("off", "auto")
        }
        self._version = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, as plain data."""
        shares = [percent / 100 for percent in self._request["changed"]]
        rivals = [made(self._plan, self._given, self._plain, self._place.mpi_comm)
                  for made in (GatherAndBroadcast, TensorByTensor)]  # fmt: skip
        ways = [(_DENSE, 1.0, "off"), *((f"delta, {100 * s:g} %", s, "auto") for s in shares)]
        kept: dict[str, list[dict[str, Any]]] = {}
        for turn in range(self._request["rounds"] + 1):  # the first one warms
            self._say(f"round {turn} of {self._request['rounds']}" if turn else "warming up")
            is_last = turn == self._request["rounds"]
            for way, share, delta in ways:
                # After one that went whole the next goes whole, and the one after it finds the second set to be copied.
                for _ in range(2 if delta == "auto" else 0):
                    self._change(share)
                    self._refit(delta)
                self._change(share)
                kept.setdefault(way, []).append(self._refit(delta))
                if is_last:
                    self._require_same(way, self._refits[delta].weights)
            for rival in rivals:
                seconds, copy_s = self._timed(rival)
                kept.setdefault(rival.name, []).append({"s": seconds, "copy_s": copy_s, "pause_s": seconds})
                if is_last:
                    self._require_same(rival.name, self._plain)
        for refit in self._refits.values():
            refit.close()
        dense_bytes = sum(self._plan.received_bytes(rank) for rank in self._plan.ranks)
        rows = []
        for way, share, _ in ways:
            rounds = kept[way][1:]
            rows.append(_row(way, share, rounds, _median(rounds, "sent"), _median(rounds, "least")))
        rows += [_row(r.name, 1.0, kept[r.name][1:], r.sent_bytes, dense_bytes) for r in rivals]
        return rows

    def _refit(self, delta: str) -> dict[str, Any]:
        """Bring one version to all ranks; return what it cost."""
        refit = self._refits[delta]
        call = refit.push if self._given else refit.pull
        self._version += 1
        seconds, copy_s = self._timed(lambda: call(self._version))
        own = refit.report()
        moves = [m for moves in self._plan.for_rank(self._comm.rank).sends.values() for m in moves]
        share = own["changed_elems"] / max(1, sum(m.elems for m in moves))
        said = self._meeting.exchange((own, round(share * sum(map(self._plan.move_bytes, moves)))))
        names = dict.fromkeys(name for report, _ in said for name in report["phases"])
        return {
            "s": seconds, "copy_s": copy_s, "pause_s": max(report["pause_s"] for report, _ in said),
            "sent": sum(report["sent_bytes"] for report, _ in said), "least": sum(least for _, least in said),
            "phases": {name: max(r["phases"].get(name, 0.0) for r, _ in said) for name in names},
        }  # fmt: skip

    def _timed(self, call: Callable[[], object]) -> tuple[float, float]:
        one, two = self._copied
        return timed(self._meeting, call), timed(self._meeting, lambda: np.copyto(two, one))

    # ---- arrays

    def _arrays(self, table: Mapping[str, Any], fill: int) -> dict[str, Any]:
        found = {}
        for name, layout in table.items():
            if self._comm.rank in layout:
                array = self._comm.empty(layout.local_shape(self._comm.rank), layout.dtype)
                _bits(array).fill(fill)
                found[name] = array
        return found

    def _change(self, share: float) -> None:
        """Flip the lowest bit of so many elements of each source, the same ones on every rank with that part."""
        draw = int(self._rng.integers(1 << 31))
        if share >= 1:
            for array in self._given.values():
                np.bitwise_xor(_bits(array), 1, out=_bits(array))
            return
        for index, (name, layout) in enumerate(self._src.items()):
            if name not in self._given:
                continue
            cell = layout.rank_map.position(self._comm.rank)[0]
            flat = _bits(self._given[name])
            at = np.random.default_rng((draw, index, cell)).integers(flat.size, size=round(share * flat.size))
            flat[at] ^= 1

    def _require_memory(self) -> None:
        """Raise where the ranks of a host need more memory than it has. Collective."""
        own = 2 * self._local_bytes(self._src) + _SETS * self._gets
        said = self._meeting.exchange((socket.gethostname(), own, HostDevice().free_bytes()))
        needs: dict[str, int] = {}
        for host, need, _ in said:
            needs[host] = needs.get(host, 0) + need
        for host, _, free in said:
            if free is not None and needs[host] > free:
                raise LowshardError(
                    f"the ranks of {host} need {needs[host] / 1e9:.1f} GB for this model, {free / 1e9:.1f} GB are "
                    "free: take a smaller model, or more hosts"
                )

    def _local_bytes(self, table: Mapping[str, Any]) -> int:
        own = [layout for layout in table.values() if self._comm.rank in layout]
        return sum(math.prod(one.local_shape(self._comm.rank)) * one.itemsize_bytes for one in own)

    def _require_same(self, way: str, held: Mapping[str, Any]) -> None:
        """Raise where a way has brought anything but the sources' content. Collective."""
        from lowshard.reshard import digest

        rank = self._comm.rank
        have = digest({n: (t, self._given.get(n)) for n, t in self._src.items()}, self._comm)
        got = digest({n: (t, held[n] if rank in t else None) for n, t in self._dst.items()}, self._comm)
        wrong = [name for name, value in have.items() if got[name] != value]
        if wrong:
            raise VerificationError(
                f"{way}: {len(wrong)} tensors are not what the sources hold, {wrong[0]} among them"
            )


def _bits(array: Any) -> Any:
    """Return an array's elements as integers, in one dimension."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def _median(rounds: Sequence[Mapping[str, Any]], key: str) -> int:
    return int(np.median([one[key] for one in rounds]))


def _row(
    way: str, changed: float, rounds: Sequence[Mapping[str, Any]], sent_bytes: int, least_bytes: int
) -> dict[str, Any]:
    phases = dict.fromkeys(name for one in rounds for name in one.get("phases", {}))
    return {
        "way": way, "changed": changed, "sent_bytes": sent_bytes, "least_bytes": least_bytes,
        "seconds": [one["s"] for one in rounds], "memcpy_s": [one["copy_s"] for one in rounds],
        "pause_s": float(np.median([one["pause_s"] for one in rounds])),
        "phases": {n: float(np.median([one["phases"].get(n, 0.0) for one in rounds])) for n in phases},
    }  # fmt: skip


def show_ways(rows: Sequence[WayRow]) -> str:
    """Return the table."""
    head = f"{'way':<20}{'sent MB':>9}{'x least':>9}{'ms':>9}{'x memcpy':>10}{'x dense':>9}{'pause ms':>10}"
    dense = next(row for row in rows if row.way == _DENSE)
    lines = [head]
    lines += [
        f"{row.way:<20}{row.sent_bytes / 1e6:>9.2f}{row.sent_bytes / max(1, row.least_bytes):>9.2f}"
        f"{row.median_s * 1e3:>9.1f}{row.ratio:>10.2f}{gain(row, dense):>9.2f}{row.pause_s * 1e3:>10.3f}"
        for row in rows
    ]
    phases = ((row.way, {n: s for n, s in row.phases.items() if s >= 0.05 * row.median_s}) for row in rows)
    lines += [
        f"{way}: " + ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in found.items())
        for way, found in phases if found
    ]  # fmt: skip
    return "\n".join(lines)


def gain(row: WayRow, dense: WayRow) -> float:
    """Return how many times as long a way takes as a dense refit: the median over rounds."""
    return float(np.median([a / b for a, b in zip(row.seconds, dense.seconds, strict=True)]))


def misses(rows: Sequence[WayRow]) -> list[str]:
    """Return what is promised and does not hold, in words."""
    named = {row.way: row for row in rows}
    found = gain(named[GatherAndBroadcast.name], named[_DENSE])
    if found >= LEAST_GAIN:
        return []
    return [
        f"gathering and broadcasting takes {found:.2f} times as long as a dense refit, {LEAST_GAIN:g} are promised"
    ]
