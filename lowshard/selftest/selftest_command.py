"""`lowshard selftest`: runs the steps, prints the table, writes selftest.json."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lowshard._version import __version__
from lowshard.command_line import count_of, folder_of
from lowshard.errors import LaunchError
from lowshard.selftest.steps import NAMES, STEPS
from lowshard.settings import cache_root, environment

if TYPE_CHECKING:
    from lowshard.selftest.runner import Outcome

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
    parser.add_argument("-n", "--ranks", type=count_of, default=2, metavar="N", help="MPI ranks (default 2)")
    parser.add_argument(
        "-o", "--out", type=folder_of, metavar="DIR",
        help="folder for logs and selftest.json, and selftest.tgz with all of these (default: selftest in lowshard's "
        "cache folder, each run anew)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="A,B", help="these steps alone")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard.launch.environment import find_rank
    from lowshard.selftest.facts import find_device
    from lowshard.selftest.runner import Runner

    chosen = list(NAMES) if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in chosen if name not in NAMES]:
        raise LaunchError(
            f"--only takes steps out of {', '.join(NAMES)}; got {', '.join(map(repr, unknown))}"
        )
    launched = find_rank(environment())
    if launched is not None and launched.size > 1:
        raise LaunchError("`lowshard selftest` starts its own ranks: run it without mpiexec, with -n")
    device, folder = find_device(args.device), _folder(args.out)
    print(f"lowshard selftest {__version__}, device {device}; logs in {folder}", flush=True)
    runner = Runner(device, args.ranks, folder, _say)
    start_s, interrupted = time.monotonic(), False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no step's process is left behind
    try:
        runner.run([step for step in STEPS if step.name in chosen])
    except KeyboardInterrupt:
        interrupted = True
    seconds, outcomes = time.monotonic() - start_s, runner.outcomes
    failed = [outcome for outcome in outcomes if outcome.result == "FAILED"]
    steps = [asdict(outcome) for outcome in outcomes]
    data = {key: value for step in steps for key, value in step.pop("data").items()}
    report = {
        "lowshard": __version__, "device": device, "ranks": args.ranks, "ok": not failed and not interrupted,
        "interrupted": interrupted, "seconds": seconds, "steps": steps, "facts": data.get("facts", {}),
        "bandwidths": data.get("bandwidths", []),
    }  # fmt: skip
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / "selftest.json").write_text(f"{text}\n", encoding="utf-8")
    if args.out is not None:
        with tarfile.open(folder / "selftest.tgz", "w:gz") as archive:  # one file to send
            for path in [folder / "selftest.json", *sorted(folder.glob("*.log"))]:
                archive.add(path, path.name)
    _show(outcomes, failed, folder / "selftest.json", seconds)
    if interrupted:
        _say(f"interrupted; done: {', '.join(outcome.name for outcome in outcomes) or 'no step'}")
        return 130
    return 1 if failed else 0


def _folder(given: Path | None) -> Path:
    """Return the folder for logs, made: the given one, or one in the cache without the files of the run before."""
    folder = given or cache_root() / "selftest"
    folder.mkdir(parents=True, exist_ok=True)
    if given is None:
        for old in folder.glob("*.*"):
            old.unlink()
    return folder.absolute()


def _say(text: str) -> None:
    print(f"lowshard selftest: {text}", file=sys.stderr, flush=True)


def _show(outcomes: Sequence[Outcome], failed: Sequence[Outcome], report: Path, seconds: float) -> None:
    """Print the table, the bandwidths, and what failed. Plain text: nothing but Python is needed for it."""
    print(f"\n{'step':13} {'result':8} {'s':>6}  finding")
    for outcome in outcomes:
        text = outcome.finding
        text = text if len(text) <= _FINDING_CHARACTERS else f"{text[: _FINDING_CHARACTERS - 4]} ..."
        print(f"{outcome.name:13} {outcome.result:8} {outcome.seconds:6.1f}  {text}")
    rows = [row for outcome in outcomes for row in outcome.data.get("bandwidths", ())]
    if rows:
        print(f"\n{'bandwidth':48} {'GB/s':>8} {'share of a copy':>16}  (bytes read and written)")
        for row in rows:
            print(f"{row['name']:48} {row['gb_per_s']:8.1f} {row['share']:16.2f}")
    for outcome in failed:
        print(
            "\n  ".join([f"\n{outcome.name} FAILED; its log: {outcome.log}", *outcome.findings[:_MOST_SHOWN]])
        )
        if len(outcome.findings) > _MOST_SHOWN:
            print(f"  and {len(outcome.findings) - _MOST_SHOWN} more in {report}")
    skipped = [outcome.name for outcome in outcomes if outcome.result == "skipped"]
    verdict = f"FAILED: {', '.join(outcome.name for outcome in failed)}." if failed else "All steps passed."
    verdict += f" Not run: {', '.join(skipped)}." if skipped else ""
    print(f"\n{verdict} {seconds:.0f} s; {report}", flush=True)
