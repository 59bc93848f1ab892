"""What benchmarks write: a table, JSON by `--json FILE`, a page by `--report DIR`, asked for before all else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.flag_value import folder_of, target_of

if TYPE_CHECKING:
    from lowshard.report.page import Page


def add_report_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--report`."""
    parser.add_argument("--report", type=folder_of, metavar="DIR",
                        help="write a page for a browser, DIR/index.html, which needs no network")  # fmt: skip


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=target_of, metavar="FILE",
                        help="write JSON to FILE beside the table; -: print it, and no table")  # fmt: skip


def require_page(args: argparse.Namespace) -> None:
    """Raise where the page that `--report` asks for cannot be written; before anything is measured.

    Raises:
        DependencyError: jinja2 is missing.
    """
    if args.report is not None:
        from lowshard.report.page import require_report

        require_report()


def write_result(
    args: argparse.Namespace, bench: str, found: Mapping[str, Any], show: Callable[[], object]
) -> None:
    """Show the table, and write the JSON that `--json` asks for; or print JSON alone, where that is "-".

    Args:
        args: of the command.
        bench: name of the benchmark.
        found: what the JSON holds beside the name of its format, the benchmark's and the machine: "rows" and more.
        show: prints the table.
    """
    if args.json is None:
        show()
        return
    from lowshard.bench.bench_device import HostDevice
    from lowshard.bench.machine import facts

    head = {"format": f"lowshard-bench-{bench}-1", "bench": bench, "machine": dict(facts(HostDevice()))}
    text = json.dumps({**head, **found}, indent=1, allow_nan=False) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    show()
    from lowshard.flag_value import write_whole

    write_whole(Path(args.json), text.encode())
    print(f"written: {args.json}")


def write_report(args: argparse.Namespace, make: Callable[[], Page]) -> None:
    """Write the page that `--report` asks for, and say where; to stderr where JSON has stdout."""
    if args.report is not None:
        from lowshard.report.page import write_page

        path = write_page(make(), args.report)
        print(f"written: {path}", file=sys.stderr if args.json == "-" else sys.stdout)
