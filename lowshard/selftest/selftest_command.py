"""`lowshard selftest`: runs the steps, prints the table, writes selftest.json."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard._version import __version__
from lowshard.command_line import count_of, folder_of
from lowshard.errors import LaunchError
from lowshard.nearest import nearest
from lowshard.selftest.step_list import NAMES, STEPS, SUITE
from lowshard.settings import environment

if TYPE_CHECKING:
    from lowshard.selftest.runner import Outcome
    from lowshard.selftest.step_setting import Device

DESCRIPTION = """\
Says whether this installation works, and how fast: run it first on a new machine. Each step runs in a process of its
own under a time limit, and the run goes on after a failure. All results are compared with plain NumPy, bit for bit.
At the end come a table, what failed and why, and the log of each failure. Where the package came without
compiled code, the first run compiles the CPU's kernels, which takes a minute or two more.
"""
_MOST_SHOWN = 5
_FINDING_CHARACTERS = 100


def add_selftest_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    steps = "\n".join(f"  {step.name:13} {step.shows}" for step in STEPS)
    parser = subparsers.add_parser(
        "selftest",
        help="does it work here, and how fast: every kernel, collective and transition against NumPy",
        description=DESCRIPTION,
        epilog=f"steps:\n{steps}\n\nExit codes: 0 all steps passed, 1 one failed, 2 wrong usage, 130 Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where arrays lie; auto: a GPU where CuPy can use one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--ranks", type=count_of, default=2, metavar="N", help="MPI ranks (default %(default)s)"
    )
    parser.add_argument(
        "-o", "--out", type=folder_of, metavar="DIR",
        help="folder for logs and selftest.json (default: a new one here, ./lowshard-selftest-...)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="A,B", help="these steps alone")
    parser.add_argument("--suite", action="store_true", help="pytest tests/gpu too, where this is a checkout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard.launch.environment import find_rank
    from lowshard.selftest.runner import Runner
    from lowshard.selftest.step_facts import find_device

    steps = [step for step in STEPS if step.name in _chosen(args.only)]
    if args.suite:
        steps.append(SUITE)
    launched = find_rank(environment())
    if launched is not None and launched.size > 1:
        raise LaunchError("`lowshard selftest` starts its own ranks: run it without mpiexec, with -n")
    device = find_device(args.device)
    folder = _folder(args.out)
    print(f"lowshard selftest {__version__}, device {device}; logs in {folder}", flush=True)
    runner = Runner(steps, device, args.ranks, folder, _say)
    start_s = time.monotonic()
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no step's process is left behind
    try:
        runner.run()
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - start_s
    _write(folder / "selftest.json", runner.outcomes, device, args.ranks, seconds, interrupted)
    _show(runner.outcomes, folder, seconds)
    if interrupted:
        done = ", ".join(outcome.name for outcome in runner.outcomes) or "no step"
        print(f"lowshard selftest: interrupted; done: {done}", file=sys.stderr)
        return 130
    return 0 if _passed(runner.outcomes) else 1


def _chosen(only: str | None) -> Sequence[str]:
    """Return the names of the steps to run."""
    if only is None:
        return NAMES
    chosen = [name.strip() for name in only.split(",")]
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise LaunchError(
            f"--only takes steps out of {', '.join(NAMES)}; got {', '.join(map(repr, unknown))}"
            f"{nearest(unknown[0], NAMES)}"
        )
    return chosen


def _folder(given: Path | None) -> Path:
    """Return the folder for logs, made: the given one, or a new one here, or where here cannot be written, in /tmp."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return given.absolute()
    prefix = f"lowshard-selftest-{time.strftime('%Y%m%d-%H%M%S')}-"
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=prefix, dir=here))


def _say(text: str) -> None:
    print(f"lowshard selftest: {text}", file=sys.stderr, flush=True)


def _passed(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.result != "FAILED" for outcome in outcomes)


def _write(
    path: Path, outcomes: Sequence[Outcome], device: Device, ranks: int, seconds: float, interrupted: bool
) -> None:
    """Write what was found as JSON."""
    data: dict[str, Any] = {}
    for outcome in outcomes:
        data.update(outcome.data)
    report = {
        "lowshard": __version__,
        "device": device,
        "ranks": ranks,
        "ok": _passed(outcomes) and not interrupted,
        "interrupted": interrupted,
        "seconds": seconds,
        "steps": [
            {name: value for name, value in asdict(outcome).items() if name != "data"} for outcome in outcomes
        ],
        "facts": data.get("facts", {}),
        "bandwidths": data.get("bandwidths", []),
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _show(outcomes: Sequence[Outcome], folder: Path, seconds: float) -> None:
    """Print the table, the bandwidths, and what failed. Plain text: nothing but Python is needed for it."""
    print(f"\n{'step':13} {'result':8} {'s':>6}  finding")
    for outcome in outcomes:
        print(f"{outcome.name:13} {outcome.result:8} {outcome.seconds:6.1f}  {_cut(_finding(outcome))}")
    rows = [row for outcome in outcomes for row in outcome.data.get("bandwidths", ())]
    if rows:
        print(f"\n{'bandwidth':48} {'GB/s':>8} {'share of a copy':>16}  (bytes read and written)")
        for row in rows:
            print(f"{row['name']:48} {row['gb_per_s']:8.1f} {row['share']:16.2f}")
    for outcome in outcomes:
        if outcome.result == "FAILED":
            print(f"\n{outcome.name} FAILED; its log: {outcome.log}")
            for line in outcome.findings[:_MOST_SHOWN]:
                print(f"  {line}")
            if len(outcome.findings) > _MOST_SHOWN:
                print(f"  and {len(outcome.findings) - _MOST_SHOWN} more in {folder / 'selftest.json'}")
    failed = [outcome.name for outcome in outcomes if outcome.result == "FAILED"]
    verdict = f"FAILED: {', '.join(failed)}." if failed else "All steps passed."
    skipped = [outcome.name for outcome in outcomes if outcome.result == "skipped"]
    not_run = f" Not run: {', '.join(skipped)}." if skipped else ""
    print(f"\n{verdict}{not_run} {seconds:.0f} s; {folder / 'selftest.json'}", flush=True)


def _finding(outcome: Outcome) -> str:
    """Return what the table says of a step."""
    compiled = f"compiled {outcome.compiled} kernels; " if outcome.compiled else ""
    return f"{compiled}{outcome.finding}"


def _cut(text: str) -> str:
    return text if len(text) <= _FINDING_CHARACTERS else f"{text[: _FINDING_CHARACTERS - 4]} ..."
