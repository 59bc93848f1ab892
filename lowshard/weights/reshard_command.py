"""`lowshard reshard`: a checkpoint on disk from one sharding to another, under a memory bound.

Inside the user's own MPI (`mpiexec -n 4 python -m lowshard reshard ...`) each process is a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.argument import brief, one_line, printable
from lowshard.argument import path as check_path
from lowshard.checkpoint.commit import missing_folders, remove_leftovers
from lowshard.errors import CheckpointError, LaunchError, VerificationError
from lowshard.plain_console import add_json_argument, put_json
from lowshard.settings import environment
from lowshard.weights.checkpoint_convert import ConvertReport, convert
from lowshard.weights.convert_plan import ConvertPlan, Settings, as_damage, patterns_of

if TYPE_CHECKING:
    from lowshard.comm import Communicator

DESCRIPTION = """\
Shards a safetensors checkpoint anew: reads IN (a file, a Hugging Face folder, a sharded checkpoint, or one file a
rank), shards every tensor as the strategies or rules say over the grid of --to, and writes the folder OUT: one
safetensors file a rank and lowshard.index.json. No process holds more than --memory, however large the checkpoint.
The input is compared with its checksums, if it has any (a plain safetensors file has none: damage done to it before
cannot be seen); what was written is read again and compared with the input, read a second time, before it takes its
place. A run that is killed leaves what was there before, or the new checkpoint, whole. With --merged it writes whole
tensors, for other readers, too.
With --delta BASE NEXT it writes what NEXT changes of BASE: OUT is a safetensors file of indices, values and digests.
With --apply DELTA... it applies such deltas to IN, each to the version that it was made from, and all of them or none:
OUT lies as IN does, and may be IN, unless that is a folder of several files of another program, which cannot be
switched in one step; --to or --merged shard it anew.
"""
EPILOG = """\
examples:
  lowshard reshard llama/ out/ --to tp=4                     # patterns by model_type in llama/config.json
  lowshard reshard out/ out2/ --from tp=4 --to tp=2,dp=2 --strategies llama -n 2 --memory 2GB
  lowshard reshard mixtral/ out/ --to tp=2,ep=4 --mxfp8
  lowshard reshard ranks/ out/ --from-rules ep-as-cp --from fsdp=4,expert=2 --to-rules pure-fsdp --to fsdp=8
  lowshard reshard out/ model.safetensors --merged           # back to one plain file
  lowshard reshard out/ hf/ --merged --file-size 2GB         # back to a folder that other libraries read
  lowshard reshard --delta v6/ v7/ -o deltas/weight_v000007.safetensors
  lowshard reshard serving/ --apply deltas/ -o serving/      # all that it lacks, in one switch
Strategies: llama (dense models of its naming), qwen, moe (Mixtral, DeepSeek-V3, gpt-oss, ...), deepseek_v4, gpt2, neox,
bert, or a YAML file of your own. Rules: a ready-made name or a path, as of `lowshard rules`.
Exit codes: 0 done, 1 the input or a delta is damaged, a delta stands on another version, or the output cannot be
written, 2 wrong usage, or nothing at IN, BASE, NEXT or DELTA.
"""
_MOST_SIZE_BYTES = (1 << 63) - 1
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# Option, name of its value (None: a flag), what it says in --help, further arguments of add_argument.
_OPTIONS: tuple[tuple[tuple[str, ...], str | None, str, dict[str, Any]], ...] = (
    (("--from",), "GRID", "how IN is sharded: for files of ranks without an index, in the order of their numbers", {}),
    (("--strategies",), "FILE", "name patterns: llama.yaml, or your own (default: by model_type in config.json)", {}),
    (("--to-rules",), "RULES", "sharding by a mesh-and-rule file instead; --to has sizes of its mesh axes", {}),
    (("--from-rules",), "RULES", "how IN is sharded, as rules; --from has sizes of its mesh axes", {}),
    (("--file-size",), "SIZE", "with --merged: most bytes of a file (default 5GB)", {"default": "5GB"}),
    (("--mxfp8",), None, "quantise linear weights to MXFP8 (e4m3, blocks of 32)", {}),
    (("--align",), "blocks", "cut between blocks that share a scale, as servers do", {"choices": ["blocks"]}),
    (("-n", "--ranks"), "N", "processes that share the work (1)", {"type": int, "default": 1}),
    (("--memory",), "SIZE", "most memory of a process (default 2GB)", {"default": "2GB"}),
    (("-o", "--out"), "OUT", "the same as OUT", {}),
    (("--apply",), "DELTA", "deltas to apply, or a folder of them (what IN has already is left out)",
     {"nargs": "+", "default": []}),
    (("--version",), "N", "with --delta: its number (default: that in OUT, or 1)", {"type": int}),
    (("--heads",), "H", "query heads (default: config.json beside IN)", {"type": int}),
    (("--kv-heads",), "H", "key-value heads (default: as many as query heads)", {"type": int}),
    (("--no-verify",), None, "do not read the output again, nor compare what several files of ranks hold", {}),
    (("--dry-run",), None, "show what would be written, and write nothing", {}),
    (("--timeout",), "S", "end the job after S seconds", {"type": float}),
)  # fmt: skip


def add_reshard_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "reshard",
        help="a safetensors checkpoint from one sharding to another, optionally to MXFP8",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="IN", help="checkpoint: a file or a folder")
    place = "folder of the new checkpoint; an old one in it is replaced"
    parser.add_argument("target", metavar="OUT", nargs="?", help=place)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--to", metavar="GRID", help="such as tp=2,dp=2 (axes tp, ep, dp; outer first)")
    merged = "whole tensors: one plain file (OUT ends in .safetensors), or a folder with an index of Hugging Face's"
    what.add_argument("--merged", action="store_true", help=merged)
    delta = "write what the second checkpoint changes of the first: BASE NEXT -o OUT"
    what.add_argument("--delta", action="store_true", help=delta)
    for names, value, text, more in _OPTIONS:
        kind: dict[str, Any] = {"action": "store_true"} if value is None else {"metavar": value}
        parser.add_argument(*names, help=text, **kind, **more)
    add_json_argument(parser)
    parser.set_defaults(func=lambda args: run(args, parser.get_default))


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 2GB, 500MB or 1.5GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", text.upper())
    size_bytes = None if match is None or match[2] not in _UNITS else float(match[1]) * _UNITS[match[2]]
    if size_bytes is None or size_bytes > _MOST_SIZE_BYTES:
        raise CheckpointError(
            f"a size reads like 2GB, 500MB or 1.5GiB, and is less than {_MOST_SIZE_BYTES} bytes, got {brief(text)}"
        )
    return int(size_bytes)


def run(args: argparse.Namespace, default: Callable[[str], Any]) -> int:
    """Run the subcommand and return the exit code; `default` says what an option has that was not given."""
    from lowshard.launch.environment import find_rank

    for given in (args.source, args.target, args.out, *args.apply):
        if given == "":
            raise LaunchError("IN, OUT and DELTA are paths, got an empty text (a variable that is not set?)")
        if given is not None:
            check_path(given, "IN, OUT and DELTA are paths", LaunchError)
    if args.delta:
        reads = ("source", "target", "out", "delta", "version", "json", "func")
        others = [n for n, value in vars(args).items() if n not in reads and value != default(n)]
        if others:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise LaunchError(f"--delta does not read other options, got {options}: leave them out")
        return _write_delta(args)
    settings = _requested(args)
    launched = find_rank(environment())
    if args.dry_run:
        is_first = launched is None or launched.rank == 0
        return _show_plan(ConvertPlan.of(settings), args.json) if is_first else 0
    if launched is not None and launched.size > 1:
        if args.ranks not in (1, launched.size) or args.timeout is not None:
            raise LaunchError(
                f"your launcher has started {launched.size} ranks and has its own limit: leave -n and --timeout out"
            )
        report = _as_a_rank(settings)
        return _show(report, settings, args.json) if launched.rank == 0 else 0
    plan = ConvertPlan.of(settings)  # what is wrong with the request is told before anything starts
    if args.ranks == 1 and args.timeout is None:
        from lowshard.comm import loopback

        with loopback(1)[0] as comm:
            return _show(_converted(settings, comm), settings, args.json)
    with tempfile.TemporaryDirectory(prefix="lowshard-reshard-") as scratch:
        path, target = Path(scratch) / "report.json", Path(plan.place)
        missing, code = missing_folders(target), -1
        try:
            code = _on_own_ranks(settings, args.ranks, path, args.timeout)
        finally:
            if code:  # ranks that were ended could not tidy up
                with suppress(OSError, CheckpointError):
                    remove_leftovers(target)
                    for folder in missing:
                        folder.rmdir()
        if code:
            return code
        return _show(ConvertReport(**json.loads(path.read_text())), settings, args.json)


def _requested(args: argparse.Namespace) -> Settings:
    """Return what the options say, or raise LaunchError where they do not go together."""
    target, was = args.target if args.out is None else args.out, vars(args)["from"]
    shards_by_name = (args.to is not None and args.to_rules is None) or (
        was is not None and args.from_rules is None
    )
    for is_wrong, rule in (
        (args.version is not None, "--version is that of the delta that --delta writes: leave it out"),
        (None not in (args.out, args.target), f"OUT is given once, got {args.target} and -o {args.out}"),
        (args.to_rules is not None and args.to is None,
         "--to-rules needs the sizes of its mesh axes: --to fsdp=4,expert=2"),
        (target is None or (args.to is None and not args.merged and not args.apply),
         "lowshard reshard takes IN, OUT and --to (such as --to tp=4), --apply or --merged; one is missing"),
        (args.to is not None and not args.to.strip(), "--to takes a grid, got an empty text"),
        (was is not None and not was.strip(), "--from takes a grid, got an empty text"),
        (args.strategies is not None and not (shards_by_name or args.merged),
         "--strategies goes with --to or --from, and here neither asks it: leave it out"),
        (args.align is not None and (args.to is None or args.to_rules is not None),
         "--align goes with --to and name patterns: leave it out"),
        (args.ranks < 1, f"--ranks is at least 1, got {args.ranks}"),
    ):  # fmt: skip
        if is_wrong:
            raise LaunchError(rule)
    return Settings(
        source=args.source, target=target, strategies=args.strategies, to=args.to or "", was=was,
        mxfp8=args.mxfp8, memory_bytes=parse_size(args.memory), num_heads=args.heads, num_kv_heads=args.kv_heads,
        verify=not args.no_verify, to_rules=args.to_rules, from_rules=args.from_rules,
        merged=args.merged, file_bytes=parse_size(args.file_size), align=args.align, deltas=tuple(args.apply),
    )  # fmt: skip


def _write_delta(args: argparse.Namespace) -> int:
    from lowshard.checkpoint.delta_file import version_of, write_delta

    if args.target is None or args.out is None:
        raise LaunchError("--delta takes two checkpoints and OUT: lowshard reshard --delta BASE NEXT -o OUT")
    version_of(Path(args.out), args.version)  # what is wrong with the request is told before anything is read
    with as_damage(args.source, args.target):
        report = write_delta(args.source, args.target, args.out, version=args.version)
    found = asdict(report) | {"base": args.source, "next": args.target, "delta": args.out}
    if put_json(args.json, lambda: json.dumps(found, indent=1)):
        return 0
    share = report.written_bytes / max(report.dense_bytes, 1)
    print(
        f"{args.out}: version {report.version} changes {report.changed_elems} elements of {report.changed_tensors} of "
        f"{report.tensors} tensors\n"
        f"  {report.written_bytes / 1e6:.3f} MB, {share:.2%} of the {report.dense_bytes / 1e6:.3f} MB of all\n"
        f"  from {report.base_digest}\n  to   {report.digest}"
    )
    return 0


def _on_own_ranks(settings: Settings, ranks: int, path: Path, timeout_s: float | None) -> int:
    from lowshard.launch.job import python_command, run_ranks

    command = python_command("lowshard.weights.reshard_command", [settings.to_json(), str(path)], module=True)
    return run_ranks(command, ranks, timeout_s=timeout_s, prefix_output=False).exit_code


def _as_a_rank(settings: Settings) -> ConvertReport:
    from mpi4py import MPI

    from lowshard import comm as lc

    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        return _converted(settings, comm)


def _converted(settings: Settings, comm: Communicator) -> ConvertReport:
    from lowshard.plain_console import transfer

    if comm.rank:
        return convert(settings, comm)
    source = Path(settings.source)
    files = [*source.glob("*.safetensors"), *source.glob("*.distcp")] if os.path.isdir(source) else [source]
    # Roughly what is read: a share of it is shown.
    all_bytes = sum(f.stat().st_size for f in files if os.path.exists(f)) * (2 if settings.verify else 1)
    aim = settings.to or ("a new version" if settings.keeps_layout else "whole tensors")
    with transfer("reshard", f"{source.name or source} to {aim}", all_bytes) as update:
        return convert(settings, comm, lambda done, total: update(done * all_bytes // max(total, 1)))


def _show_plan(plan: ConvertPlan, target: str | None) -> int:
    rows = [
        {"name": name, "dtype": tiling.dtype, "shape": list(tiling.shape), "strategy": said}
        for name, (tiling, said) in plan.saved.items()
    ]
    found = {"ranks": plan.num_ranks, "bytes": plan.catalog.size_bytes, "tensors": rows}
    if put_json(target, lambda: json.dumps(found, indent=1)):
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{len(rows)} tensors, {plan.catalog.size_bytes / 1e9:.3f} GB, over {plan.num_ranks} ranks"
    )
    for column in ("tensor", "dtype", "shape", "strategy"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(str(row[key]))) for key in ("name", "dtype", "shape", "strategy")))
    Console().print(table)
    return 0


def _show(report: ConvertReport, settings: Settings, target: str | None) -> int:
    found = asdict(report) | {"source": settings.source, "target": settings.target}
    if put_json(target, lambda: json.dumps(found, indent=1)):
        return 0
    print(
        f"{settings.target}: {report.tensors} tensors ({report.quantised} as MXFP8) in {report.files} files, "
        f"{report.written_bytes / 1e6:.1f} MB written"
    )
    for note in report.notes:
        print(one_line(f"  note: {note}"))
    if settings.to and not settings.to_rules and settings.strategies is None:
        print(f"  sharded by the name patterns {patterns_of(settings).where}")
    if settings.deltas and not report.applied:
        print(f"  deltas: none applied, {settings.source} has the newest version already")
    if report.applied:
        print(f"  deltas: {report.applied} applied, up to version {report.version}")
    if report.checksummed_bytes:
        print(
            f"  input: {report.checksummed_bytes / 1e6:.1f} of {report.input_bytes / 1e6:.1f} MB compared with the "
            f"checksums of {settings.source}, all equal"
        )
    else:
        print(f"  input: {settings.source} has no checksums: not verified")
    again = "read again and compared with the input, read a second time: all equal"
    compared = f"{report.verified_bytes / 1e6:.1f} MB {again}"
    print(f"  output: {compared if settings.verify else 'not compared (--no-verify)'}")
    of = "the deltas say" if report.applied else f"{settings.source} says"
    equal = f", of {report.equal_digests} tensors compared with what {of}" if report.equal_digests else ""
    print(f"  digest: {report.digest}{equal}")
    return 0


def main(arguments: list[str]) -> int:
    """Run a rank as `lowshard reshard` started it: settings in, report to a file."""
    settings_json, path = arguments
    from mpi4py import MPI

    is_first = MPI.COMM_WORLD.Get_rank() == 0
    try:
        report = _as_a_rank(Settings.from_json(settings_json))
    except (CheckpointError, VerificationError) as error:  # the same on all ranks
        if is_first:
            print(f"lowshard: error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    if is_first:
        Path(path).write_text(json.dumps(asdict(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
