"""`lowshard inspect`: what is in a checkpoint, who holds it, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowshard.argument import one_line
from lowshard.box import Box, box_text
from lowshard.errors import CheckpointError
from lowshard.plain_console import add_json_argument, put_json

if TYPE_CHECKING:
    from lowshard.checkpoint.catalog import StoredTensor
    from lowshard.checkpoint.overview import Overview

DESCRIPTION = """\
Shows what is in a checkpoint: its tensors, how each is sharded, which file and which rank holds what, its checksums.
PATH is a sharded checkpoint of lowshard, a safetensors file, or a Hugging Face folder. Headers and indexes are read;
with --verify all data is, too, and compared with the checksums and digests of the index (plain files have none: their
digest is worked out). Two checkpoints with one digest hold the same tensors, however each is cut.
"""
EPILOG = """\
examples:
  lowshard inspect out/
  lowshard inspect out/ model.layers.0.mlp.up_proj.weight     # one tensor: files, boxes, ranks
  lowshard inspect out/ --verify --json
In the table "dim 0 by 4" is split along dim 0 into 4 parts, "x2" is held twice.
Exit codes: 0 whole, 1 a file is missing or damaged, or the folder has no checkpoint, 2 wrong usage, or nothing at PATH.
"""
_WIDTH = 80
_MOST_FILES = 12


def add_inspect_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="what is in a checkpoint, who holds what, whether it is whole",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint: a file or a folder")
    parser.add_argument("tensor", metavar="TENSOR", nargs="?", help="show this tensor alone")
    parser.add_argument("--verify", action="store_true", help="read the data; compare checksums and digests")
    parser.add_argument("--all", action="store_true", help="a line for each tensor, not one for all layers")
    add_json_argument(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard.checkpoint.overview import look_at, verified
    from lowshard.plain_console import transfer

    if not os.path.exists(Path(args.path)):
        raise CheckpointError(f"{args.path}: there is no such file or folder")
    try:
        overview = look_at(args.path)
    except CheckpointError as error:
        error.exit_code = 1
        raise
    names = [args.tensor] if args.tensor is not None else list(overview.catalog.tensors)
    chosen = [overview.catalog.tensor(name) for name in names]
    if args.verify:
        total = sum(p.entry.size_bytes for t in chosen for p in t.parts)
        with transfer("inspect", "comparing checksums", total) as update:
            overview = verified(overview, names, update)
        chosen = [overview.catalog.tensor(name) for name in names]
    whole = args.tensor is None
    found = overview.to_json if whole else partial(overview.tensor_json, chosen[0])
    if not put_json(args.json, lambda: json.dumps(found(), indent=1)):
        shown = _table(overview, args.all) if args.tensor is None else _one(overview, chosen[0])
        digest = overview.digest if args.tensor is None else chosen[0].digest
        of = "" if args.tensor is None else " (of this tensor)"
        for line in (
            *shown,
            _checksums(overview, chosen, args.verify),
            "digest: not recorded; --verify works it out" if digest is None else f"digest: {digest}{of}",
            *(f"BROKEN: {problem}" for problem in overview.problems.values()),
        ):
            print(one_line(line))
    return 1 if overview.problems else 0


def _table(overview: Overview, each: bool) -> Iterator[str]:
    from lowshard.checkpoint.overview import rank_of

    catalog, files, tensors = overview.catalog, len(overview.files), len(overview.catalog.tensors)
    count = catalog.num_ranks
    form = f": {overview.form}" + ("" if count is None else f" of {count} rank{'s' * (count != 1)}")
    yield _short(catalog.where, _WIDTH - len(form)) + form
    yield f"{tensors} tensor{'s' * (tensors != 1)}, {_mb(catalog.size_bytes)} MB in {files} file{'s' * (files != 1)}"
    for key, value in catalog.metadata.items():
        yield _short(f"metadata {key}: {value}", _WIDTH)
    yield ""
    yield f"{'rank':>5} {'MB':>12}  file"
    for number, (path, size_bytes) in enumerate(overview.files.items()):
        is_broken = (path, "") in overview.problems
        if _MOST_FILES // 2 <= number < files - _MOST_FILES // 2 and files > _MOST_FILES and not is_broken:
            if number == _MOST_FILES // 2:
                yield f"{'...':>5}"
            continue
        rank = None if count == 1 else rank_of(path)
        name = _short(Path(path).name, 51) + "  BROKEN" * is_broken
        yield f"{'-' if rank is None else rank:>5} {_mb(size_bytes):>12}  {name}"
    yield ""
    rows = [("tensor", "dtype", "shape", "cut"), *_rows(overview, each)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    name_width = max(16, min(widths[0], _WIDTH - sum(widths[1:]) - 3))
    for name, *rest in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield " ".join([f"{_short(name, name_width):<{name_width}}", *cells]).rstrip()
    yield ""


def _rows(overview: Overview, each: bool) -> Iterator[tuple[str, str, str, str]]:
    from lowshard import dtypes
    from lowshard.checkpoint.overview import split_text
    from lowshard.rules.logical_tensor import group_name

    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for tensor in overview.catalog.tensors.values():
        shape = _short(f"[{', '.join(map(str, tensor.said_shape))}]", 20)
        key = tensor.name if each else group_name(tensor.name)
        row = key, dtypes.get(tensor.dtype).safetensors, shape, _short(split_text(tensor), 20)
        groups.setdefault(row, []).append(tensor.name)
    for (key, dtype, shape, split), names in groups.items():
        yield names[0] if len(names) == 1 else f"{key} ({len(names)})", dtype, shape, split


def _one(overview: Overview, tensor: StoredTensor) -> Iterator[str]:
    from lowshard.checkpoint.header import header_box
    from lowshard.checkpoint.overview import held, rank_of, split_text

    size_bytes = sum(part.entry.size_bytes for part in tensor.parts)
    yield tensor.name
    yield f"{tensor.dtype} [{', '.join(map(str, tensor.said_shape))}], {_mb(size_bytes)} MB, {split_text(tensor)}"
    if tensor.strategy is not None:
        yield _short(f"strategy: {tensor.strategy}", _WIDTH)
    for path in dict.fromkeys(part.file for part in tensor.parts):
        rank = rank_of(path)
        by = "" if rank is None or overview.catalog.num_ranks == 1 else f" (written by rank {rank})"
        yield f"{_short(Path(path).name, 55)}{by}{'  BROKEN' * ((path, '') in overview.problems)}"
        for part in tensor.parts:
            if part.file == path:
                crc = "no checksum" if part.crc32 is None else f"crc32 {part.crc32:08x}"
                state = "  DAMAGED" if overview.problem(part) else ""
                yield f"  {_short(box_text(header_box(tensor.dtype, part.box)), 52)}  {crc}{state}"
    same: dict[tuple[Box, ...], list[int]] = {}
    for number, boxes in held(tensor).items():
        same.setdefault(boxes, []).append(number)
    if same:
        yield "held when it was saved by"
    for boxes, holders in same.items():
        yield _short(f"  rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))}", _WIDTH)
        for box in boxes:
            yield _short(f"    {box_text(header_box(tensor.dtype, box))}", _WIDTH)
    yield ""


def _checksums(overview: Overview, chosen: Sequence[StoredTensor], asked: bool) -> str:
    parts = [part for tensor in chosen for part in tensor.parts]
    if not overview.checksummed_bytes:
        return "checksums: none in plain files, so damaged data cannot be seen"
    if not asked:
        summed_bytes = sum(part.entry.size_bytes for part in parts if part.crc32 is not None)
        return f"checksums: of {_mb(summed_bytes)} MB, not compared (--verify)"
    bad = sum(overview.problem(part) is not None for part in parts)
    found = f"{bad} parts differ" if bad else "all equal"
    return f"checksums: {_mb(overview.verified_bytes or 0)} MB compared, {found}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.3f}"


def _short(text: str, width: int) -> str:
    """Return a text of one line of at most that many characters: its middle gives way."""
    text = one_line(text)
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"
