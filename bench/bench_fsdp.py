"""`lowshard bench fsdp`: a step of sharded training on ranks of this machine, beside torch FSDP2 where it is there."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lowshard.bench.bench_progress import Progress
from lowshard.bench.json_argument import add_json_argument, counts_of, natural_of, write_result
from lowshard.command_line import count_of
from lowshard.errors import DependencyError, LowshardError, TimedOut
from lowshard.nearest import nearest
from lowshard.settings import environment

DESCRIPTION = """\
Trains an MLP (eight layers of 2560 by default, 52 million parameters, AdamW, one thread a rank) in NumPy with each
sharding strategy, and prints the time and processor seconds of a step, the bytes each rank sends beside what the
formula says, and memory. With --compare-torch the same model is trained by torch FSDP2 (DDP for none) over gloo
right before.
"""
EPILOG = """\
Columns: median wall time of a step; processor seconds of all ranks; bytes sent by all ranks, in parameters of four
bytes, counted and by the formula; pool and optimizer state of a rank; peak resident memory of the largest rank, with
what it maps of its neighbours'; with torch, the ratios of wall and processor time, below 1 where lowshard is faster.
Exit codes: 0 done, 1 bytes other than the formula's (or, with --check, a ratio above a half), 2 wrong usage, 70 a rank
died, 71 timed out, 130 interrupted.
"""
MODES = ("full", "sgo", "sgo-replicated", "none", "hybrid")
_LIMIT = 0.5
_TIMEOUT_S = 600.0


def add_fsdp_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `fsdp`."""
    parser = benches.add_parser(
        "fsdp", help="steps of sharded training, beside torch FSDP2", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=counts_of, default="2", metavar="N[,N...]", help="ranks to start (default 2)"
    )
    parser.add_argument("--mode", type=_modes, default="full", metavar="NAME[,NAME...]",
                        help=f"strategies, of {', '.join(MODES)}, or all (default full)")  # fmt: skip
    parser.add_argument(
        "--intra", type=count_of, default=2, metavar="N", help="shard group of hybrid (default 2)"
    )
    parser.add_argument(
        "--width", type=count_of, default=2560, metavar="N", help="width of a layer (default 2560)"
    )
    parser.add_argument("--layers", type=count_of, default=8, metavar="N", help="layers (default 8)")
    parser.add_argument("--batch", type=count_of, default=16, metavar="N", help="rows a rank (default 16)")
    parser.add_argument("--steps", type=count_of, default=5, metavar="N", help="steps that count (default 5)")
    parser.add_argument(
        "--warmup", type=natural_of, default=2, metavar="N", help="steps before them (default 2)"
    )
    parser.add_argument("--compute", default=None, choices=("float32", "bfloat16"), help="Precision.compute")
    parser.add_argument(
        "--prefetch", type=natural_of, default=1, metavar="N", help="units gathered ahead (default 1)"
    )
    parser.add_argument(
        "--communicators", type=int, default=1, choices=(1, 2), help="2: reductions have their own"
    )
    parser.add_argument(
        "--compare-torch", action="store_true", help="also torch FSDP2, which must be installed"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 where a ratio to torch is above 0.5"
    )
    add_json_argument(parser)
    parser.set_defaults(func=run_fsdp)


def run_fsdp(args: argparse.Namespace) -> int:
    """Run `lowshard bench fsdp` and return the exit code."""
    if args.check and not args.compare_torch:
        raise LowshardError("--check judges ratios to torch: pass --compare-torch with it")
    if args.compare_torch and importlib.util.find_spec("torch") is None:
        raise DependencyError("--compare-torch needs torch, which is not installed: pip install torch")
    cases = [(ranks, mode) for ranks in args.ranks for mode in args.mode if _fits(args, ranks, mode)]
    if not cases:
        raise LowshardError(
            f"hybrid cuts the ranks into groups of --intra {args.intra}, which divides none of --ranks "
            f"{','.join(map(str, args.ranks))}: pass a divisor"
        )
    rows = []
    with Progress("fsdp") as progress:
        progress.expect(len(cases) * (1 + args.compare_torch))
        for ranks, mode in cases:
            request = {
                "ranks": ranks, "mode": mode, "intra": args.intra, "dims": [args.width] * (args.layers + 1),
                "batch": args.batch, "steps": args.steps, "warmup": args.warmup, "compute": args.compute,
                "prefetch": args.prefetch, "communicators": args.communicators,
            }  # fmt: skip
            theirs = None
            if args.compare_torch:
                progress.step(f"torch {mode} on {ranks} ranks")
                theirs = _rival(request)
            progress.step(f"{mode} on {ranks} ranks")
            rows.append(_row(request, _own(request), theirs))
    write_result(args, "fsdp", {"rows": rows}, lambda: _print(rows, args.compare_torch))
    wrong = [row for row in rows if row["sent_bytes"] != row["expected_bytes"]]
    for row in wrong:
        print(f"lowshard bench fsdp: {row['mode']} on {row['ranks']} ranks sent {row['sent_bytes']} bytes a step, the "
              f"formula says {row['expected_bytes']}", file=sys.stderr)  # fmt: skip
    slow = [
        row for row in rows if args.check and max(row.get("wall_ratio", 0), row.get("cpu_ratio", 0)) > _LIMIT
    ]
    for row in slow:
        print(f"lowshard bench fsdp: {row['mode']} on {row['ranks']} takes {row['wall_ratio']:.2f} of torch's time "
              f"and {row['cpu_ratio']:.2f} of its processor time; the limit is {_LIMIT}", file=sys.stderr)  # fmt: skip
    return 1 if wrong or slow else 0


def _fits(args: argparse.Namespace, ranks: int, mode: str) -> bool:
    return mode != "hybrid" or ranks % args.intra == 0


class _RanksFailed(LowshardError):
    """Ranks have ended without a result."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _own(request: dict[str, Any]) -> list[dict[str, Any]]:
    from lowshard.launch.job import python_command, run_ranks

    with tempfile.TemporaryDirectory() as place:
        asked = Path(place) / "request.json"
        asked.write_text(json.dumps(request))
        said = io.StringIO()
        done = run_ranks(
            python_command("lowshard.bench.fsdp_step", [str(asked), place], module=True), request["ranks"],
            timeout_s=_TIMEOUT_S, env=_one_thread(), stdout=said, stderr=said,
        )  # fmt: skip
        if done.exit_code:
            raise _RanksFailed(f"the ranks failed ({done.message}):\n{said.getvalue()}", done.exit_code)
        return _read(place, request["ranks"])


def _rival(request: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        asked = Path(place) / "request.json"
        asked.write_text(json.dumps(request))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "lowshard.bench.fsdp_rival", str(asked), place], env=_one_thread(),
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TimedOut(f"torch has not ended within {_TIMEOUT_S:g} s") from error
        if done.returncode:
            raise LowshardError(f"torch failed:\n{done.stderr[-2000:]}")
        return _read(place, request["ranks"])


def _one_thread() -> dict[str, str]:
    return {**environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _read(place: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(Path(place, f"{rank}.json").read_text()) for rank in range(ranks)]


def _row(
    request: dict[str, Any], ours: list[dict[str, Any]], theirs: list[dict[str, Any]] | None
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {
        "mode": request["mode"], "ranks": request["ranks"], "params": ours[0]["params"],
        "wall_s": ours[0]["wall_s"], "cpu_s": sum(r["cpu_s"] for r in ours),
        "sent_bytes": sum(int(r["sent_bytes"]) for r in ours), "expected_bytes": sum(r["expected_bytes"] for r in ours),
        "pool_bytes": ours[0]["pool_bytes"], "state_bytes": ours[0]["state_bytes"],
        "peak_mib": max(r["peak_mib"] for r in ours), "base_mib": max(r["base_mib"] for r in ours),
        "wait_s": max(r["wait_s"] for r in ours),
    }  # fmt: skip
    if theirs is not None:
        row |= {
            "torch": theirs[0]["torch"], "torch_wall_s": theirs[0]["wall_s"],
            "torch_cpu_s": sum(r["cpu_s"] for r in theirs), "torch_peak_mib": max(r["peak_mib"] for r in theirs),
        }  # fmt: skip
        row["wall_ratio"] = row["wall_s"] / row["torch_wall_s"]
        row["cpu_ratio"] = row["cpu_s"] / row["torch_cpu_s"]
    return row


def _print(rows: list[dict[str, Any]], compared: bool) -> None:
    """Print a table of ours and one of torch's beside it; each fits a terminal of 80 columns."""
    from rich.table import Table

    from lowshard.plain_console import make_console, print_table

    def show(title: str, heads: tuple[str, ...], cells: list[list[str]]) -> None:
        table = Table(title=title)
        for head in ("strategy", "ranks", *heads):
            table.add_column(head, justify="left" if head == "strategy" else "right", no_wrap=True)
        for row, more in zip(rows, cells, strict=True):
            table.add_row(row["mode"], str(row["ranks"]), *more)
        print_table(make_console(), table)

    def mib(size_bytes: int) -> str:
        return f"{size_bytes / 2**20:.0f}"

    ours = []
    for row in rows:
        unit_bytes = 4 * row["params"]
        ours.append([
            f"{row['wall_s']:.3f}", f"{row['cpu_s']:.3f}", f"{row['sent_bytes'] / unit_bytes:.4f}",
            f"{row['expected_bytes'] / unit_bytes:.4f}", mib(row["pool_bytes"]), mib(row["state_bytes"]),
            f"{row['peak_mib']:.0f}",
        ])  # fmt: skip
    heads = ("wall s", "cpu s", "sent", "formula", "pool", "state", "peak")
    show("a step of sharded training, memory in MiB", heads, ours)
    if not compared:
        return
    theirs = [
        [
            f"{row['torch_wall_s']:.3f}", f"{row['torch_cpu_s']:.3f}", f"{row['torch_peak_mib']:.0f}",
            f"{row['wall_ratio']:.2f}", f"{row['cpu_ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    show("torch, and ours as a multiple of it", ("wall s", "cpu s", "peak", "x wall", "x cpu"), theirs)


def _modes(text: str) -> list[str]:
    names = list(MODES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"strategies are {', '.join(MODES)}, or all; got {unknown[0]!r}{nearest(unknown[0], MODES)}"
        )
    return names
