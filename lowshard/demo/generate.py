"""SmolLM2 on each rank: its part of the weights is loaded, 64 tokens are generated, one process is compared.

`python -m lowshard.demo.generate SETTINGS REPORT` is what `lowshard demo --model smollm2` starts.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.demo import smollm2
from lowshard.demo.llama import Decoder, LlamaConfig, expected_shapes, heads_of, tensor_parallel_strategies
from lowshard.demo.progress_bar import Progress
from lowshard.demo.smollm2 import Model
from lowshard.tiling import Tiling
from lowshard.weights import load, nodes_of, plan_load

TOKENS = 64
LOGITS_BOUND = 1e-4
"""Largest difference of a logit that passes, in parts of the largest logit."""
QUESTION = "Why is the sky blue?"


@dataclass(frozen=True)
class RankRow:
    """What one rank held and did."""

    rank: int
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    held_bytes: int
    read_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class GenerateReport:
    """What the demo shows."""

    model: str
    ranks: tuple[RankRow, ...]
    load_s: float
    prompt_tokens: int
    tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    text: str
    logits_difference: float
    """Largest difference from the one-process forward, in parts of its largest logit."""
    tokens_per_s: float
    reference_tokens_per_s: float

    @property
    def ok(self) -> bool:
        """Whether tokens are equal and logits close."""
        return self.tokens == self.reference_tokens and self.logits_difference <= LOGITS_BOUND

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"ok": self.ok}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GenerateReport:
        """Return the report that `to_json` wrote."""
        values = {k: v for k, v in data.items() if k != "ok"}
        ranks = tuple(
            RankRow(**(r | {"query_heads": tuple(r["query_heads"]), "kv_heads": tuple(r["kv_heads"])}))
            for r in values["ranks"]
        )
        tokens = {k: tuple(values[k]) for k in ("tokens", "reference_tokens")}
        return cls(**(values | {"ranks": ranks} | tokens))


def settings_json(model: Model, count: int = TOKENS) -> str:
    """Return what a rank is told, as one line."""
    tokenizer = None if model.tokenizer is None else str(model.tokenizer)
    return json.dumps([str(model.checkpoint), asdict(model.config), tokenizer, model.name, count])


def run_rank(settings: str, comm: Communicator) -> GenerateReport:
    """Load, generate, compare with one process (rank 0), and return the report, equal on all ranks.

    Collective: all ranks of the communicator call this.
    """
    checkpoint, config_values, tokenizer, name, count = json.loads(settings)
    config = LlamaConfig(**config_values)
    model = Model(Path(checkpoint), config, None if tokenizer is None else Path(tokenizer), name)
    shown, rank = Progress(comm.rank), comm.rank
    cut = tensor_parallel_strategies(config, comm.size)
    shapes = expected_shapes(config)
    tilings = {n: cut[n].layout(s, "float32") for n, s in shapes.items()}
    plan = plan_load(model.checkpoint, tilings, nodes=nodes_of(comm))
    comm.barrier()
    start = time.perf_counter()
    with shown.phase(f"load {len(tilings)} tensors over {comm.size} ranks"):
        local = load(model.checkpoint, plan, comm)
    load_s = time.perf_counter() - start
    prompt = smollm2.chat_prompt(model, QUESTION)
    with shown.phase(f"generate {count} tokens, tensor parallel"):
        start = time.perf_counter()
        tokens, logits = Decoder(config, local, comm).greedy(prompt, count)
        parallel_s = time.perf_counter() - start
    del local
    found = [0.0, 0.0, *([0.0] * count)]
    with shown.phase(f"generate {count} tokens, one process"):
        if rank == 0:
            start = time.perf_counter()
            whole = {n: Tiling.whole(s, "float32") for n, s in shapes.items()}
            alone = Decoder(config, load(model.checkpoint, plan_load(model.checkpoint, whole)))
            start = time.perf_counter()
            right, truth = alone.greedy(prompt, count)
            difference = float(np.abs(logits - truth).max() / np.abs(truth).max())
            found = [difference, time.perf_counter() - start, *map(float, right)]
        numbers = np.array(found)
        comm.broadcast(numbers)
    reference = tuple(int(t) for t in numbers[2:])
    rows = tuple(
        RankRow(
            r, *heads_of(config, comm.size, r), plan.held_bytes(r), plan.read_bytes(r), plan.received_bytes(r)
        )
        for r in range(comm.size)
    )
    return GenerateReport(
        name, rows, load_s, len(prompt), tuple(tokens), reference, smollm2.text_of(model, tokens), float(numbers[0]),
        count / parallel_s, count / float(numbers[1]),
    )  # fmt: skip


def show(report: GenerateReport) -> None:
    """Print the report as a table."""
    from rich.table import Table

    from lowshard.plain_console import make_console

    console = make_console(piped_width=80)
    table = Table(title=f"{report.model} over {len(report.ranks)} ranks")
    for column in ("rank", "query heads", "key-value heads", "held MB", "read MB", "received MB"):
        table.add_column(column, justify="right")
    for row in report.ranks:
        spans = [f"{a}-{b - 1}" if b > a else "none" for a, b in (row.query_heads, row.kv_heads)]
        sizes = [f"{n / 1e6:.1f}" for n in (row.held_bytes, row.read_bytes, row.received_bytes)]
        table.add_row(str(row.rank), *spans, *sizes)
    console.print(table)
    console.print(f"Q: {QUESTION}\nA: {report.text}")
    same = "equal" if report.tokens == report.reference_tokens else "DIFFERENT"
    console.print(
        f"logits within {report.logits_difference:.1e} of the largest (bound {LOGITS_BOUND:g}), "
        f"{len(report.tokens)} greedy tokens {same} to one process",
    )
    console.print(
        f"{report.tokens_per_s:.1f} tokens/s, one process {report.reference_tokens_per_s:.1f}; loaded in "
        f"{report.load_s:.2f} s",
    )


def main(arguments: list[str]) -> int:
    """Run a rank: settings in, report to a file."""
    from mpi4py import MPI

    settings, path = arguments
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        report = run_rank(settings, comm)
        if comm.rank == 0:
            Path(path).write_text(json.dumps(report.to_json()), encoding="utf-8")
        comm.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
