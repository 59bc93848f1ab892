"""What benchmarks write: a table, and JSON by `--json FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowshard.flag_value import target_of, write_whole


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=target_of, metavar="FILE",
                        help="write JSON to FILE beside the table; -: print it, and no table")  # fmt: skip


def write_result(
    args: argparse.Namespace, bench: str, found: Mapping[str, Any], show: Callable[[], object]
) -> None:
    """Show the table, and write the JSON that `--json` asks for; or print JSON alone, where that is "-"."""
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
    write_whole(Path(args.json), text.encode())
    print(f"written: {args.json}")
