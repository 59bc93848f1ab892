"""Types of the options of benchmarks, the options that all of them have, and what is done with a report in the end."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.bench.bench_report import Report
from lowshard.bench.plot import draw, require_plot
from lowshard.errors import LowshardError
from lowshard.plain_console import add_json_argument, put_json

_MOST_COUNT = 10**9
_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Size:
    """A number of elements or of bytes."""

    count: int
    in_bytes: bool


def count(text: str) -> int:
    """Return an integer of 1 or more."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """Return an integer of 0 or more."""
    return _integer(text, 0)


def list_of(kind: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """Return the type of values separated by commas, each once."""
    return lambda text: tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))


def positive(text: str) -> float:
    """Return a finite number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not (found > 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return found


def size(text: str) -> int:
    """Return bytes written as nccl-tests takes them: 1024, 1K, 64M, 1.5G; K, M, G and T are powers of 1024."""
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)([KMGT]?)(?:I?B)?", text.strip().upper())
    if found is not None:
        made = float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")
        if 1 <= made <= 1 << 60 and made == int(made):
            return int(made)
    raise argparse.ArgumentTypeError(
        f"a size is bytes such as 1024, 1K, 64M or 1G (powers of 1024), got {text!r}"
    )


def sizes(text: str) -> tuple[Size, ...]:
    """Return sizes of elements or bytes, written as 64Mi, 1000000, 128MiB or 1GB, separated by commas."""
    found = []
    for part in text.split(","):
        words = re.fullmatch(r"(\d{1,18})([a-zA-Z]*?)(B?)", part.strip())
        if words is None or words[2].lower() not in _POWERS or not int(words[1]):
            raise argparse.ArgumentTypeError(
                f"a size is written as 64Mi, 1000000, 128MiB or 1GB, got {part!r}"
            )
        found.append(Size(int(words[1]) * _POWERS[words[2].lower()], bool(words[3])))
    return tuple(found)


def file(text: str) -> Path:
    """Return the path of a file in a folder that is there."""
    path = Path(text)
    if not text or path.is_dir() or text.startswith("~") or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {text!r}")
    return path


def add_parser(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add the parser of a benchmark, without options."""
    parser = benches.add_parser(
        name, help=summary, description=description, epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(func=run)
    return parser


def add_result_arguments(parser: argparse.ArgumentParser, check: str) -> None:
    """Add what all benchmarks do with their results."""
    group = parser.add_argument_group("results")
    add_json_argument(group)
    group.add_argument("--plot", type=file, metavar="FILE", help="draw the figures (.png, .svg, .pdf)")
    group.add_argument(
        "--check", "--check-limits", dest="check_limits", action="store_true",
        help=f"exit code 1, and say which, if a figure misses its limit; {check}",
    )  # fmt: skip


def require_results(args: argparse.Namespace) -> None:
    """Raise what keeps results from being written, before anything is measured."""
    if args.plot is not None:
        require_plot(args.plot)


def conclude(report: Report, args: argparse.Namespace, lines: Iterable[str]) -> int:
    """Print the table, write JSON and plot, judge the limits, and return the exit code."""
    if put_json(args.json, report.dump):
        lines = ()
    for line in lines:
        print(line)
    if args.plot is not None:
        draw(report, args.plot)
    written = [str(path) for path in (args.json, args.plot) if path not in (None, "-")]
    if written and args.json != "-":
        print(f"# written: {', '.join(written)}")
    complaints = [f"{report.wrong} values are wrong"] if report.wrong else []
    complaints += report.missed(args.check_limits)
    limits = report.every_limit
    if args.check_limits and limits and all(limit.ok is None for limit in limits):
        complaints.append("no limit was judged, the machine was busy")
    for text in complaints:
        print(f"lowshard bench {report.bench}: {text}", file=sys.stderr)
    return 1 if complaints else 0


def selected(names: Sequence[str], only: str | None) -> tuple[str, ...]:
    """Return the names that begin with one of some comma-separated words; all of them for None."""
    if only is None:
        return tuple(names)
    wanted = [part.split() for part in only.split(",")]
    for words in wanted:
        if not words or not any(name.split()[: len(words)] == words for name in names):
            raise LowshardError(
                f"--only takes words that names of rows begin with, got {' '.join(words)!r}; the rows are: "
                + "; ".join(names)
            )
    return tuple(name for name in names if any(name.split()[: len(words)] == words for words in wanted))


def _integer(text: str, least: int) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= _MOST_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer of {least} to {_MOST_COUNT:,}, got {text!r}")
