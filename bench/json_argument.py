"""What benchmarks write: a table, and JSON by `--json FILE`; and types of options that only benchmarks have."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from lowshard.argument import quoted
from lowshard.command_line import count_of, made_target_of, seconds_of, write_whole

_BYTES = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)([KMGT]?)(?:I?B)?")


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


def natural_of(text: str) -> int:
    """Return an integer of 0 or more."""
    return 0 if text == "0" else count_of(text)


def counts_of(text: str) -> tuple[int, ...]:
    """Return integers of 1 or more, separated by commas, each once."""
    return tuple(dict.fromkeys(count_of(part.strip()) for part in text.split(",")))


def bandwidth_of(text: str) -> float:
    """Return a bandwidth of 0 GB/s or more."""
    return 0.0 if text == "0" else seconds_of(text)


def size_of(text: str) -> int:
    """Return a size in bytes, written as nccl-tests takes it: 1024, 1K, 64M, 1.5G; K, M, G and T are powers of 1024."""
    found = _BYTES.fullmatch(text.strip().upper())
    if found is not None:
        size = Decimal(found[1]) * 1024 ** " KMGT".index(found[2] or " ")
        if 1 <= size <= 1 << 60 and size == int(size):
            return int(size)
    raise argparse.ArgumentTypeError(
        f"a size is bytes such as 1024, 1K, 64M (powers of 1024), got {quoted(text)}"
    )


def target_of(text: str) -> str:
    """Return the path of a file in a folder that is there, or -, which is stdout."""
    folder = Path(made_target_of(text)).absolute().parent
    if not folder.exists():
        raise argparse.ArgumentTypeError(f"there is no folder {str(folder)!r}: make it first")
    return text


def file_of(text: str) -> Path:
    """Return the path of a file in a folder that is there."""
    return Path(target_of(text))
