"""`lowshard bench refit --model`: the refit of a whole model, dense and by what changed, beside what most stacks do."""

from __future__ import annotations

import argparse
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench.bench_device import HostDevice, require_memory
from lowshard.bench.bench_limits import GATHERED
from lowshard.bench.bench_report import Beside, Limit, Report, Row, Spread
from lowshard.bench.bench_world import Progress, Rank
from lowshard.bench.machine import rank_facts
from lowshard.bench.rival_mpi import GatherAndBroadcast, TensorByTensor
from lowshard.bench.turn_timing import Runner, take_turns
from lowshard.box import intersect, split_interval
from lowshard.errors import LowshardError, VerificationError
from lowshard.mesh import DeviceMesh
from lowshard.reading import reader
from lowshard.tiling import Tile, Tiling

SAMPLE = "sample"
"""The model that is made up: of Llama's names, as large as --size says."""
SAMPLE_HIDDEN = 1024
_DENSE = "dense"
_SETS = 7
"""Destinations: two of each refit, one of the rivals, two of the copy; of sources two, with a delta's copy."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]


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
        from lowshard.weights.name_pattern import NamePatterns, Sizes

        patterns, sizes = NamePatterns.load(self.strategies), Sizes(*self.heads)
        trains, serves = grid_of(self.trains), grid_of(self.serves)
        at = 0 if self.together else trains.num_ranks
        return (
            _layouts(trains, trains.tilings(self.shapes, patterns, sizes), 0),
            _layouts(serves, serves.tilings(self.shapes, patterns, sizes), at),
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


def grid_of(text: str) -> Any:
    """Return the grid of a text such as `fsdp=2,tp=2`, outermost axis first: as of `lowshard reshard`, or with fsdp."""
    from lowshard.weights.checkpoint_grid import Grid

    tokens = [token.strip() for token in text.split(",")]
    at = next((i for i, token in enumerate(tokens) if token.startswith("fsdp=")), None)
    if at is None:
        return Grid.parse(text)
    number = tokens.pop(at).partition("=")[2]
    if not (number.isdecimal() and 0 < int(number) <= 1 << 20):
        raise LowshardError(f"a grid reads like 'fsdp=2,tp=2', got {text!r}")
    axes = list(Grid.parse(",".join(tokens)).axes if tokens else ())
    axes.insert(at, ("fsdp", int(number)))
    return Grid(tuple(axes))


def _layouts(grid: Any, tilings: Mapping[str, tuple[Any, Any]], offset: int) -> dict[str, Any]:
    from lowshard.reshard import TensorLayout

    found = {}
    for name, (tiling, _) in tilings.items():
        if "fsdp" in dict(grid.axes):
            tiling = _cut_rows(tiling, grid.mesh)
        found[name] = TensorLayout.from_tiling(tiling).shifted(offset)
    return found


def _cut_rows(tiling: Tiling, mesh: DeviceMesh) -> Tiling:
    """Return a tiling in which ranks along `fsdp` share the rows (dim 0) that each of them holds here."""
    if not tiling.shape:
        return tiling
    tiles, shapes = [], []
    for rank in range(tiling.num_ranks):
        shape, place = tiling.local_shape(rank), mesh.coord(rank)[mesh.axis_index("fsdp")]
        start, stop = split_interval((0, shape[0]), mesh.axis_size("fsdp"), place, "balanced")
        kept = []
        for tile in tiling.tiles(rank):
            common = intersect(tile.local, ((start, stop), *tile.local[1:]))
            if common is not None:
                low, high = common[0]
                moved = tile.box[0][0] - tile.local[0][0]
                rows = (low + moved, high + moved)
                kept.append(Tile((rows, *tile.box[1:]), ((low - start, high - start), *common[1:])))
        tiles.append(tuple(kept))
        shapes.append((stop - start, *shape[1:]))
    return Tiling(tiling.shape, tiling.dtype, tuple(tiles), tuple(shapes))


def measure_model(rank: Rank, request: Any) -> Any:
    """Measure every way; the report on rank 0. Collective: all ranks call this."""
    say = Progress("refit", rank.host.rank == 0)
    with rank.open("auto") as comm:
        machine = rank_facts(rank.host, comm, rank.mpi_comm)
        rows = _Measured(rank, comm, request).rows(say)
    settings = {key: request[key] for key in ("rounds", "changed", "seed")}
    settings |= {key: request["model"][key] for key in ("trains", "serves", "strategies", "together")}
    return Report("refit", machine, settings, tuple(rows)).to_json() if rank.host.rank == 0 else None


class _Measured:
    """One rank's arrays and the ways that move them."""

    def __init__(self, rank: Rank, comm: Any, request: Any) -> None:
        from lowshard.reshard import Refit, build_reshard_plan

        self._rank, self._host, self._comm, self._request = rank, rank.host, comm, request
        self._src, self._dst, size = ModelSpec.from_json(request["model"]).tables()
        if size != comm.size:
            raise LowshardError(f"these grids have {size} ranks, the job has {comm.size}")
        self._gets = self._local_bytes(self._dst)
        self._require_memory()
        self._plan = build_reshard_plan(self._src, self._dst)
        self._given = self._arrays(self._src, 1)
        self._rng = np.random.default_rng(request["seed"])
        self._copied = np.ones(self._gets, np.uint8), np.ones(self._gets, np.uint8)
        self._plain = self._arrays(self._dst, 0)
        self._refits = {
            delta: Refit(self._plan, comm, self._given, self._arrays(self._dst, 0), delta=delta)
            for delta in ("off", "auto")
        }
        self._version = 0

    def rows(self, say: Callable[[str], object]) -> list[Row]:
        """Return the rows."""
        rounds = self._request["rounds"]
        rivals = [made(self._plan, self._given, self._plain, self._rank.rivals)
                  for made in (GatherAndBroadcast, TensorByTensor)]  # fmt: skip
        shares = [percent / 100 for percent in self._request["changed"]]
        ways = [(_DENSE, 1.0, "off"), *((f"delta, {100 * s:g} %", s, "auto") for s in shares)]
        kept: dict[str, list[dict[str, Any]]] = {way: [] for way, _, _ in ways}
        one, two = self._copied
        copy = Runner(lambda: np.copyto(two, one))
        runners: list[Runner] = []
        for way, share, delta in ways:
            runners += [self._runner(way, share, delta, kept[way]), copy]
        for rival in rivals:
            check = partial(self._require_same, rival.name, self._plain)
            runners += [Runner(rival, after=self._in_last_round(check)), copy]
        clock = self._rank.clock()
        timings = take_turns(runners, rounds, clock, warm=1, say=say)
        for refit in self._refits.values():
            refit.close()
        dense, dense_bytes = timings[0], sum(self._plan.received_bytes(rank) for rank in self._plan.ranks)
        rows = []
        names = [*(way for way, _, _ in ways), *(rival.name for rival in rivals)]
        for index, (name, own, other) in enumerate(zip(names, timings[::2], timings[1::2], strict=True)):
            if name in kept:
                found = _medians(kept[name][1:]) | {"changed": ways[index][1]}
            else:
                sent = rivals[index - len(ways)].sent_bytes
                found = {"sent": sent, "least_bytes": dense_bytes, "pause_s": own.median_s, "changed": 1.0}
            beside = {"memcpy": Beside(other), "dense": Beside(dense)}
            limits: tuple[Limit, ...] = ()
            if name == GatherAndBroadcast.name:
                gain = Spread.of(own.over(dense)).median
                limits = (Limit("x dense", gain, GATHERED, at_least=True),)
            rows.append(Row(name, int(found.pop("sent")), own, beside, limits, {"way": name, **found}))
        return rows

    def _runner(self, way: str, share: float, delta: str, kept: list[dict[str, Any]]) -> Runner:
        """Return what brings one version to all ranks and notes what it cost."""

        def before() -> None:
            # After one that went whole the next goes whole, and the one after it finds the second set to be copied.
            for _ in range(2 if delta == "auto" else 0):
                self._change(share)
                self._refit(delta)
            self._change(share)

        check = self._in_last_round(lambda: self._require_same(way, self._refits[delta].weights))

        def after() -> None:
            kept.append(self._cost(delta))
            check()

        return Runner(partial(self._refit, delta), before=before, after=after)

    def _in_last_round(self, check: Callable[[], object]) -> Callable[[], None]:
        left = self._request["rounds"] + 1  # the first one warms

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                check()

        return count

    def _refit(self, delta: str) -> None:
        refit = self._refits[delta]
        self._version += 1
        (refit.push if self._given else refit.pull)(self._version)

    def _cost(self, delta: str) -> dict[str, Any]:
        """Return what the last version cost, over all ranks. Collective."""
        own = self._refits[delta].report()
        moves = [m for moves in self._plan.for_rank(self._comm.rank).sends.values() for m in moves]
        share = own["changed_elems"] / max(1, sum(m.elems for m in moves))
        said = self._host.exchange((own, round(share * sum(map(self._plan.move_bytes, moves)))))
        names = dict.fromkeys(name for report, _ in said for name in report["phases"])
        return {
            "pause_s": max(report["pause_s"] for report, _ in said),
            "sent": sum(report["sent_bytes"] for report, _ in said), "least_bytes": sum(least for _, least in said),
            "phases": {name: max(r["phases"].get(name, 0.0) for r, _ in said) for name in names},
        }  # fmt: skip

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
        said = self._host.exchange((socket.gethostname(), own, HostDevice().free_bytes()))
        for host, _, free in said:
            need = sum(bytes_ for name, bytes_, _ in said if name == host)
            require_memory(need, free, "model, or take more hosts", host)

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


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds of what a version cost."""
    phases = dict.fromkeys(name for one in rounds for name in one["phases"])
    found = {
        key: float(np.median([one[key] for one in rounds])) for key in ("pause_s", "sent", "least_bytes")
    }
    return found | {
        "least_bytes": int(found["least_bytes"]),
        "phases": {n: float(np.median([one["phases"].get(n, 0.0) for one in rounds])) for n in phases},
    }
