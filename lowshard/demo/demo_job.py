"""The main job on each rank: read, move, verify, refit to MXFP8 three times, verify, encode and compare."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lowshard import DeviceMesh, Layout, Replicated, Sharded, __version__, dtypes, execute_all, redistribute
from lowshard.box import split_interval
from lowshard.checkpoint import CheckpointReader, Header
from lowshard.comm import Communicator, share_text
from lowshard.demo.demo_report import FORMAT, accuracy_text
from lowshard.demo.encoder import Compute, EncoderConfig, embed, tensor_parallel_spec
from lowshard.demo.source import Source
from lowshard.demo.text import SENTENCES, tokenize, tokenizer_name
from lowshard.errors import MeshError
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.redistribute_plan import plan_redistribute
from lowshard.reshard import MXFP8ReshardTransform, Refit, build_reshard_plan

if TYPE_CHECKING:
    from lowshard.bench.bench_world import Rank

Local = Mapping[str, np.ndarray]
Layouts = dict[str, Layout]
Found = TypeVar("Found")

FACTORS = (0.5, 0.75, 1.0)
"""What the weights of each version are of the file's."""
_FP32_BOUND, _BF16_BOUND, _MXFP8_BOUND = 1e-5, 0.999, 0.99
_BLOCK_ELEMS = 32


def request_of(source: Source, tp: int | None) -> str:
    """Return what the ranks are told."""
    return json.dumps(asdict(source) | {"tp": tp}, default=str)


def run(rank: Rank, request: str | Callable[[], str]) -> dict[str, Any]:
    """Do the job and return its report; rank 0's request counts. Collective: all ranks call this."""
    text = request() if callable(request) else request
    with rank.open("mpi") as comm:
        told = json.loads(share_text(comm, text)[0])
        tp, config = told.pop("tp"), told.pop("config")
        for name in ("checkpoint", "tokenizer"):
            told[name] = told[name] and Path(told[name])
        return _Job(Source(config=config and EncoderConfig(**config), **told), tp, comm).report()


def grid(world_size: int, tp: int | None, config: EncoderConfig | None) -> tuple[int, int]:
    """Return (dp, tp) of the serving mesh; without a tp, 2 where it fits, else all ranks, else 1."""
    heads = 0 if config is None else config.num_heads
    if tp is None:
        tp = next(n for n in (2, world_size, 1) if world_size % n == 0 and heads % n == 0)
    if world_size % tp or heads % tp:
        what = f"{world_size} ranks" if world_size % tp else f"the model's {heads} attention heads"
        raise MeshError(
            f"a serving mesh is dp x tp ranks, each with whole heads: tp={tp} does not divide {what}; pass another "
            "--tp, or other --ranks"
        )
    return world_size // tp, tp


def layouts_of(header: Header, config: EncoderConfig | None, dp: int, tp: int) -> tuple[Layouts, Layouts]:
    """Return the training layout of every tensor, cut on dim 0 over all ranks, and its serving layout."""
    flat, mesh = DeviceMesh((dp * tp,), ("fsdp",)), DeviceMesh((dp, tp), ("dp", "tp"))
    training, serving = {}, {}
    for name, entry in header.tensors.items():
        ndim = len(entry.shape)
        if config is not None:
            spec = tensor_parallel_spec(name, ndim, config)
        else:  # nothing is known of the model: cut the last dim of matrices
            spec = (*[None] * (ndim - 1), "tp") if ndim > 1 else (None,) * ndim
        training[name] = Layout.from_spec(flat, entry.shape, entry.dtype, ("fsdp",) if ndim else ())
        serving[name] = Layout.from_spec(mesh, entry.shape, entry.dtype, spec)
    return training, serving


class _Job:
    """One rank's walk through the phases."""

    def __init__(self, source: Source, tp: int | None, comm: Communicator) -> None:
        self.source, self.comm = source, comm
        self.dp, self.tp = grid(comm.size, tp, source.config)
        self.rows: list[dict[str, Any]] = []
        self.accuracy: list[dict[str, Any]] = []
        self.note = f"no forward pass: {source.skip_reason}"

    def report(self) -> dict[str, Any]:
        """Do every phase and return the report, equal on all ranks."""
        with CheckpointReader(self.source.checkpoint) as self.reader:
            header = self.reader.header
            self.training, self.serving = layouts_of(header, self.source.config, self.dp, self.tp)
            training = self._read()
            serving = self._move(training)
            served = self._refit(training)
            if self.source.config is not None:
                self._encode(self.source.config, serving, served)
        return {
            "format": FORMAT,
            "ok": all(row["ok"] for row in self.rows),
            "checkpoint": self.source.name,
            "checkpoint_bytes": header.file_bytes,
            "world_size": self.comm.size,
            "before": f"every tensor cut on dim 0 over {self.comm.size} ranks",
            "after": f"dp {self.dp} x tp {self.tp}, attention and MLP weights cut over tp",
            "rows": self.rows,
            "accuracy": self.accuracy,
            "accuracy_note": self.note,
            "matrices": self._matrices(),
            "environment": _environment(),
        }

    # ---- phases

    def _read(self) -> Local:
        training, seconds = self._timed(lambda: self._local(self.training))
        moved = self.reader.bytes_read
        wanted = sum(lay.local_bytes(rank) for lay in self.training.values() for rank in lay.mesh.ranks)
        whole = sum(lay.size_bytes for lay in self.training.values())
        check = f"{whole / 1e6:.1f} MB, each byte read by one rank"
        self._row("read the training layout", seconds, check, self._sum(moved) == wanted, moved)
        return training

    def _move(self, training: Local) -> Local:
        plans = {name: plan_redistribute(lay, self.serving[name]) for name, lay in self.training.items()}
        planned = sum(plan.received_bytes(self.comm.rank) for plan in plans.values())
        execute_all(plans, training, self.comm)  # compiles what is not compiled yet, in no figure

        def move() -> tuple[dict[str, Any], int]:
            self.comm.traffic.clear()
            return execute_all(plans, training, self.comm), self.comm.traffic.received_bytes

        (moved, received), seconds = self._timed(move)
        right = self._sum(received != planned) == 0
        self._row("move to the serving layout", seconds, "moved what was planned, no more", right, received)
        serving = {name: np.asarray(array) for name, array in moved.items()}
        pairs = ((serving[name], self._file(name)) for name in serving)
        (wrong, elems), seconds = self._timed(lambda: self._compared(pairs))
        check = f"{elems:,} elements, {wrong} differ from the file"
        self._row("verify every element", seconds, check, wrong == 0)
        return serving

    def _refit(self, training: Local) -> dict[str, MXFP8Tensor]:
        names = [name for name, layout in self.serving.items() if _is_quantised(name, layout)]
        if not names:
            return {}
        buffers = {}
        for name in names:
            rows, cols = self.serving[name].local_shape(self.comm.rank)
            data, scale = (np.zeros((rows, n), np.uint8) for n in (cols, cols // _BLOCK_ELEMS))
            buffers[name] = MXFP8Tensor(data, scale)
        mine = {name: np.array(training[name]) for name in names}
        plan = build_reshard_plan(
            *({name: of[name] for name in names} for of in (self.training, self.serving))
        )
        how = MXFP8ReshardTransform(names, buffers, convert_on_send=True)
        with Refit(plan, self.comm, mine, {}, how) as refit:
            refit.push(0)  # nothing is compiled in a figure
            for version, factor in enumerate(FACTORS, 1):
                for name, array in mine.items():
                    array[...] = training[name] * factor
                _, seconds = self._timed(lambda: refit.push(version))  # noqa: B023  # called at once
                true = {name: self._quantised(name, factor) for name in names}
                found = [
                    part for name in names for part in (refit.weights[name].data, refit.weights[name].scale)
                ]
                wanted = [part for name in names for part in (true[name].data, true[name].scale)]
                wrong, total = self._compared(zip(found, wanted, strict=True))
                check = f"version {refit.version}: {total:,} codes and scales, {wrong} wrong"
                right = wrong == 0 and refit.version == version
                moved = refit.report()["sent_bytes"]
                self._row(f"refit {version} of {len(FACTORS)} to MXFP8", seconds, check, right, moved)
            return dict(refit.weights)

    def _encode(self, config: EncoderConfig, serving: Local, served: Mapping[str, MXFP8Tensor]) -> None:
        ids, mask = tokenize(self.source, SENTENCES)
        truth = np.empty((len(ids), config.hidden_size), np.float32)
        if self.comm.rank == 0:
            whole = {name: self.reader.read_box(name) for name in self.reader.names}
            truth[...] = embed(whole, config, ids, mask)
        self.comm.broadcast(truth)
        mesh = DeviceMesh((self.dp, self.tp), ("dp", "tp"))
        dp_index, tp_index = mesh.coord(self.comm.rank)
        start, stop = split_interval((0, len(ids)), self.dp, dp_index)
        cut = Layout(mesh, truth.shape, "float32", (Sharded(0), Replicated()))
        group = self.comm.split(dp_index, tp_index)
        assert group is not None

        def encoded(weights: Local, compute: Compute) -> np.ndarray:
            part = embed(weights, config, ids[start:stop], mask[start:stop], group, compute)
            whole = cut.with_placements((Replicated(), Replicated()))
            return np.asarray(redistribute(np.ascontiguousarray(part), cut, whole, self.comm))

        decoded = {name: dequantize_mxfp8(tensor, "bfloat16") for name, tensor in served.items()}
        ways: tuple[tuple[str, Local, Compute, float], ...] = (
            ("fp32", serving, "float32", _FP32_BOUND),
            ("bf16", serving, "bfloat16", _BF16_BOUND),
            ("MXFP8", {**serving, **decoded}, "bfloat16", _MXFP8_BOUND),
        )
        for label, weights, compute, bound in ways:
            found, seconds = self._timed(lambda: encoded(weights, compute))  # noqa: B023  # called at once
            exact = compute == "float32"
            measured = float(np.abs(found - truth).max()) if exact else _lowest_cosine(found, truth)
            figure: dict[str, Any] = {
                "label": f"{label} weights",
                "kind": "max_difference" if exact else "cosine",
                "measured": measured if math.isfinite(measured) else None,  # JSON has no NaN
                "bound": bound,
                "ok": measured <= bound if exact else measured >= bound,
            }
            self.accuracy.append(figure)
            self._row(f"encode with {label} weights", seconds, accuracy_text(figure), figure["ok"])
        group.close()
        tokens = f"{int(mask.sum())} tokens, {tokenizer_name(self.source)}"
        self.note = f"{len(ids)} sentences, {tokens}, beside the unsharded fp32 model"

    # ---- the file's values

    def _local(self, layouts: Layouts) -> Local:
        return {name: self.reader.read(name, lay, self.comm.rank) for name, lay in layouts.items()}

    def _file(self, name: str) -> np.ndarray:
        """Return what this rank's part of a tensor must be in the serving layout."""
        return self.reader.read(name, self.serving[name], self.comm.rank)

    def _quantised(self, name: str, factor: float) -> MXFP8Tensor:
        true = self._file(name)
        return quantize_mxfp8((true * factor).astype(true.dtype).astype(dtypes.get("bfloat16").numpy))

    def _compared(self, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[int, int]:
        """Return how many elements of all ranks differ in any bit, and of how many."""
        wrong = elems = 0
        for found, true in pairs:
            bits = np.dtype(f"u{true.itemsize}")  # NaN equals itself, -0 is not 0
            a, b = (np.ascontiguousarray(array).reshape(-1).view(bits) for array in (found, true))
            wrong += int(np.count_nonzero(a != b))
            elems += true.size
        return self._sum(wrong), self._sum(elems)

    def _matrices(self) -> list[dict[str, Any]]:
        """Return who holds what of the first matrices that tp cuts, one by rows and one by columns."""
        found: dict[int, dict[str, Any]] = {}
        for name, after in self.serving.items():
            if len(after.shape) == 2 and "tp" in after.spec and (dim := after.spec.index("tp")) not in found:
                held = {"before": self.training[name], "after": after}
                boxes = {
                    when: [layout.box(rank) for rank in layout.mesh.ranks] for when, layout in held.items()
                }
                found[dim] = {"name": name, "shape": after.shape, **boxes}
        return [found[dim] for dim in sorted(found)]

    # ---- measuring

    def _timed(self, work: Callable[[], Found]) -> tuple[Found, float]:
        self.comm.barrier()
        start_s = time.perf_counter()
        found = work()
        return found, self._max(time.perf_counter() - start_s)

    def _row(self, phase: str, seconds: float, check: str, ok: bool, moved: int | None = None) -> None:
        """Add a line of the table. Collective: the largest byte count of all ranks is reported."""
        most = None if moved is None else int(self._max(moved))
        self.rows.append(
            {"phase": phase, "moved_bytes_per_rank": most, "seconds": seconds, "check": check, "ok": bool(ok)}
        )

    def _sum(self, value: int) -> int:
        total = np.array([value], np.int64)
        self.comm.all_reduce(total, total)
        return int(total[0])

    def _max(self, value: float) -> float:
        most = np.array([value], np.float64)
        self.comm.all_reduce(most, most, op="max")
        return float(most[0])


def _is_quantised(name: str, layout: Layout) -> bool:
    """Say whether a tensor is a linear weight that is cut in whole blocks of 32 on every rank."""
    return (
        len(layout.shape) == 2
        and "embeddings" not in name
        and layout.dtype in ("float32", "bfloat16", "float16")
        and all(layout.local_shape(rank)[1] % _BLOCK_ELEMS == 0 for rank in layout.mesh.ranks)
    )


def _lowest_cosine(a: np.ndarray, b: np.ndarray) -> float:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(wide_a, axis=1) * np.linalg.norm(wide_b, axis=1)
    return float(((wide_a * wide_b).sum(axis=1) / norms).min())


def _environment() -> dict[str, str]:
    from mpi4py import MPI

    return {
        "lowshard": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
