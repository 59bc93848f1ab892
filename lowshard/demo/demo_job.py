"""The main job on each rank: read, move, verify, refit to MXFP8, run the encoder, report.

`python -m lowshard.demo.demo_job SETTINGS` (JSON) is what `lowshard demo` starts; inside the user's own MPI
`lowshard demo` calls `run_rank` itself.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lowshard import DeviceMesh, Layout, Replicated, Sharded, __version__, redistribute
from lowshard import comm as lc
from lowshard.bench.memcpy import memcpy_bytes_per_s
from lowshard.box import split_interval
from lowshard.checkpoint import CheckpointReader
from lowshard.comm import Communicator
from lowshard.demo.demo_report import Accuracy, DemoReport, PhaseRow, PlanView
from lowshard.demo.encoder import EncoderConfig, embed, embed_tensor_parallel
from lowshard.demo.progress_bar import Progress
from lowshard.demo.source import Source
from lowshard.demo.text import SENTENCES, tokenize, tokenizer_name
from lowshard.demo.weights import Layouts, MXFP8Buffers, count_wrong, move_to_serving, read_training
from lowshard.errors import MeshError

REFITS = 3
FP32_BOUND, BF16_BOUND, MXFP8_BOUND = 1e-5, 0.999, 0.99


@dataclass(frozen=True)
class Settings:
    """What the ranks are told."""

    source: Source
    tp: int
    """Ranks that share one copy of the serving weights."""

    def to_json(self) -> str:
        """Return one line that `from_json` reads."""
        source = asdict(self.source) | {
            "checkpoint": str(self.source.checkpoint),
            "tokenizer": None if self.source.tokenizer is None else str(self.source.tokenizer),
        }
        return json.dumps({"source": source, "tp": self.tp})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        data = json.loads(text)
        source = data["source"]
        return cls(
            Source(
                Path(source["checkpoint"]),
                None if source["tokenizer"] is None else Path(source["tokenizer"]),
                None if source["config"] is None else EncoderConfig(**source["config"]),
                source["name"],
                source["skip_reason"],
            ),
            data["tp"],
        )


def grid(world_size: int, tp: int | None) -> tuple[int, int]:
    """Return (dp, tp) of the serving mesh; without a tp, 2 where it divides, else all ranks.

    Raises:
        MeshError: tp does not divide the number of ranks.
    """
    tp = tp if tp is not None else 2 if world_size % 2 == 0 else world_size
    if tp < 1 or world_size % tp:
        raise MeshError(
            f"a serving mesh is dp x tp ranks: tp={tp} does not divide {world_size}; pass --tp with a divisor "
            "of the number of ranks, or other --ranks"
        )
    return world_size // tp, tp


class _Run:
    """One rank's walk through the phases."""

    def __init__(self, settings: Settings, comm: Communicator, progress: Progress) -> None:
        self.source, self.comm, self.progress = settings.source, comm, progress
        self.dp, self.tp = grid(comm.size, settings.tp)
        self.rows: list[PhaseRow] = []
        self.accuracy: tuple[Accuracy, ...] = ()
        self.note: str | None = None
        self.plan: PlanView | None = None
        self.memcpy_per_s = 1.0

    def all(self) -> DemoReport:
        """Do every phase and return the report, equal on all ranks."""
        with self.progress.phase("memcpy, the yardstick"):
            self.memcpy_per_s = memcpy_bytes_per_s(self.comm)
        with CheckpointReader(self.source.checkpoint) as reader:
            layouts = Layouts.of(reader.header, self.source.config, self.dp, self.tp)
            training = self._read(reader, layouts)
            serving = self._move(training, layouts, reader)
            buffers = self._refit(training, layouts, reader)
            if self.source.config is None:
                self.note = f"no forward pass: {self.source.skip_reason}"
            else:
                self._forward(self.source.config, serving, buffers)
            return DemoReport(
                checkpoint=self.source.name,
                checkpoint_bytes=reader.header.file_bytes,
                world_size=self.comm.size,
                before=f"every tensor cut on dim 0 over {self.comm.size} ranks",
                after=f"dp {self.dp} x tp {self.tp}, attention and MLP weights cut over tp",
                rows=tuple(self.rows),
                memcpy_gb_per_s=self.memcpy_per_s / 1e9,
                accuracy=self.accuracy,
                accuracy_note=self.note,
                matrices=layouts.views(reader.header),
                environment=tuple(_environment().items()),
                plan=self.plan,
            )

    # ---- phases

    def _read(self, reader: CheckpointReader, layouts: Layouts) -> dict[str, np.ndarray]:
        with self._timed("read the training layout") as phase:
            training = read_training(reader, layouts, self.comm.rank)
        own = sum(lay.local_bytes(self.comm.rank) for lay in layouts.training.values())
        read, wanted = self._sum(reader.bytes_read), self._sum(own)
        size = sum(lay.size_bytes for lay in layouts.training.values())
        copies = sum(
            lay.size_bytes * (self.comm.size - 1) for lay in layouts.training.values() if not lay.shape
        )
        phase.done(
            reader.bytes_read,
            f"{size / 1e6:.1f} MB, each byte read by one rank",
            read == wanted == size + copies,
        )
        return training

    def _make_ready(self, training: Mapping[str, np.ndarray], layouts: Layouts) -> None:
        """Do once what is measured afterwards: code that is not compiled yet is compiled here, and in no figure."""
        with self._timed("make ready: move and refit") as phase:
            move_to_serving(training, layouts, self.comm)
            MXFP8Buffers(layouts, self.comm.rank).refit(training, self.comm)
        phase.done(None, "loads code, or compiles it the first time, for what follows")

    def _move(
        self, training: Mapping[str, np.ndarray], layouts: Layouts, reader: CheckpointReader
    ) -> dict[str, np.ndarray]:
        with self._timed(f"plan {len(layouts.training)} moves") as phase:
            planned = sum(plan.received_bytes(self.comm.rank) for plan in layouts.plans.values())
        phase.done(None, f"{self._sum(planned) / 1e6:.1f} MB will move")
        self._make_ready(training, layouts)
        self.comm.traffic.clear()
        with self._timed("move to the serving layout") as phase:
            serving = move_to_serving(training, layouts, self.comm)
            moved = self.comm.traffic.received_bytes
        phase.done(moved, "moved what was planned, no more", self._sum(moved != planned) == 0)
        self._note_plan(layouts, moved, phase.seconds)
        with self._timed("verify every element") as phase:
            wrong, elems = map(self._sum, count_wrong(serving, layouts, reader, self.comm.rank))
        phase.done(None, f"{elems:,} elements, {wrong} differ from the file", wrong == 0)
        return serving

    def _note_plan(self, layouts: Layouts, moved_bytes: int, measured_s: float) -> None:
        """Keep what was planned and what came of it. Collective: all ranks call this."""
        plans = layouts.plans
        every = np.empty(self.comm.size, np.int64)
        self.comm.all_gather(np.array([moved_bytes], np.int64), every)
        example = max(plans, key=lambda name: len(plans[name].steps) * plans[name].src.size_bytes)
        self.plan = PlanView(
            tuple(sum(p.received_bytes(rank) for p in plans.values()) for rank in range(self.comm.size)),
            tuple(every.tolist()),
            sum(plan.predicted_s for plan in plans.values()),
            measured_s,
            example,
            plans[example].explain(),
        )

    def _refit(
        self, training: Mapping[str, np.ndarray], layouts: Layouts, reader: CheckpointReader
    ) -> MXFP8Buffers:
        buffers = MXFP8Buffers(layouts, self.comm.rank)
        before = buffers.addresses()
        moved_addresses = 0
        for number in range(1, REFITS + 1):
            self.comm.traffic.clear()
            with self._timed(f"refit {number} of {REFITS} to MXFP8") as phase:
                buffers.refit(training, self.comm)
                moved = self.comm.traffic.received_bytes
            moved_addresses = self._sum(buffers.addresses() != before)
            phase.done(
                moved,
                f"{len(buffers.tensors)} matrices, {2 * self._sum(len(buffers.tensors)):,} buffers, addresses "
                + ("unchanged" if moved_addresses == 0 else "CHANGED"),
                moved_addresses == 0,
            )
        with self._timed("verify the MXFP8 buffers") as phase:
            wrong, total = map(self._sum, buffers.count_wrong(reader))
        phase.done(None, f"{total:,} codes and scales, {wrong} wrong", wrong == 0)
        return buffers

    def _forward(
        self, config: EncoderConfig, serving: Mapping[str, np.ndarray], buffers: MXFP8Buffers
    ) -> None:
        ids, mask = tokenize(self.source, SENTENCES)
        mesh = DeviceMesh((self.dp, self.tp), ("dp", "tp"))
        dp_index, tp_index = mesh.coord(self.comm.rank)
        group = self.comm.split(dp_index, tp_index)
        assert group is not None
        start, stop = split_interval((0, len(ids)), self.dp, dp_index)
        cut = Layout(mesh, (len(ids), config.hidden_size), "float32", (Sharded(0), Replicated()))
        whole = cut.with_placements((Replicated(), Replicated()))

        def tensor_parallel(weights: Mapping[str, np.ndarray], compute: str) -> np.ndarray:
            part = embed_tensor_parallel(weights, config, ids[start:stop], mask[start:stop], group, compute)  # type: ignore[arg-type]
            gathered = redistribute(np.ascontiguousarray(part), cut, whole, self.comm)
            assert gathered is not None
            return np.asarray(gathered)

        results = {}
        with self._timed("make ready: encoder") as phase:
            ways = (
                ("fp32", serving, "float32"),
                ("bf16", serving, "bfloat16"),
                ("MXFP8", buffers.weights(serving), "bfloat16"),
            )
            for _, weights, compute in ways:
                tensor_parallel(weights, compute)
        phase.done(None, "loads code; decodes the weights in MXFP8")
        for label, weights, compute in ways:
            self.comm.traffic.clear()
            group.traffic.clear()
            with self._timed(f"encode {len(ids)} sentences, {label}") as phase:
                results[label] = tensor_parallel(weights, compute)
                moved = group.traffic.received_bytes + self.comm.traffic.received_bytes
            phase.done(moved, f"tensor parallel over {self.tp}, dp {self.dp}", compare=False)
        with self._timed("encode unsharded, one process") as phase:
            truth = np.empty((len(ids), config.hidden_size), np.float32)
            if self.comm.rank == 0:
                with CheckpointReader(self.source.checkpoint) as reader:
                    weights = {name: reader.read_box(name) for name in reader.names}
                truth[...] = embed(weights, config, ids, mask)
            self.comm.broadcast(truth)
        phase.done(None, "fp32, the reference")
        group.close()
        self.accuracy = (
            Accuracy(
                "fp32 weights", "max_difference", float(np.abs(results["fp32"] - truth).max()), FP32_BOUND
            ),
            Accuracy("bf16 weights", "cosine", _lowest_cosine(results["bf16"], truth), BF16_BOUND),
            Accuracy("MXFP8 weights", "cosine", _lowest_cosine(results["MXFP8"], truth), MXFP8_BOUND),
        )
        self.note = f"{len(ids)} sentences, {int(mask.sum())} tokens, {tokenizer_name(self.source)}"

    # ---- measuring

    @contextmanager
    def _timed(self, label: str) -> Iterator[_Phase]:
        self.comm.barrier()
        phase = _Phase(self, label)
        with self.progress.phase(label):
            start_s = time.perf_counter()
            yield phase
            phase.seconds = self._max(time.perf_counter() - start_s)

    def _sum(self, value: float) -> int:
        total = np.array([value], np.int64)
        self.comm.all_reduce(total, total)
        return int(total[0])

    def _max(self, value: float) -> float:
        most = np.array([value])
        self.comm.all_reduce(most, most, op="max")
        return float(most[0])


class _Phase:
    """One row of the table in the making."""

    def __init__(self, run: _Run, label: str) -> None:
        self._run, self._label = run, label
        self.seconds = 0.0

    def done(self, moved_bytes: int | None, check: str, ok: bool = True, compare: bool = True) -> None:
        """Add the row. Collective: the largest byte count of all ranks is reported."""
        run = self._run
        most = None if moved_bytes is None else int(run._max(moved_bytes))
        speed = ratio = None
        if most and compare:
            speed = most / self.seconds / 1e9
            ratio = self.seconds / (most / run.memcpy_per_s)
        run.rows.append(PhaseRow(self._label, most, self.seconds, speed, ratio, check, ok))


def _lowest_cosine(a: np.ndarray, b: np.ndarray) -> float:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(wide_a, axis=1) * np.linalg.norm(wide_b, axis=1)
    return float(((wide_a * wide_b).sum(axis=1) / norms).min())


def _environment() -> dict[str, str]:
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    return {
        "lowshard": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi": library,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def run_rank(settings: Settings) -> DemoReport:
    """Run the job on this rank of MPI's world and return the report.

    Collective: all ranks of MPI's world call this.
    """
    from mpi4py import MPI

    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        return _Run(settings, comm, Progress(comm.rank)).all()


def main(arguments: list[str]) -> int:
    """Run a rank as `lowshard demo` started it: settings in, report to a file."""
    from lowshard.demo.demo_report import write_json

    settings_json, report_path = arguments
    report = run_rank(Settings.from_json(settings_json))
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        write_json(report, report_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
