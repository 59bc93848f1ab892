"""`lowshard rules`: dump, compare, explain, check."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.command_line import made_target_of
from lowshard.errors import CheckpointError, RulesError
from lowshard.nearest import nearest
from lowshard.plain_console import add_json_argument, busy, make_console, put_json

if TYPE_CHECKING:
    from rich.console import Console

    from lowshard.mesh import DeviceMesh
    from lowshard.rules.finding import Finding
    from lowshard.rules.logical_tensor import LogicalTensor
    from lowshard.rules.ruleset import RuleSet

DESCRIPTION = """\
Mesh-and-rule files: which mesh axes shard which dims of which tensors. The files are MaxText's (mesh_axes,
data_sharding, logical_axis_rules) and are resolved as MaxText resolves them; no device is touched, no array made.
"""
EXAMPLES = """\
examples:
  lowshard rules check   --rules my.yml --devices 16 --ici fsdp=-1,expert=4 --logical logical_shardings.json
  lowshard rules explain moe/wi --rules default --logical logical_shardings.json
  lowshard rules dump    --rules ep-as-cp --devices 8 --ici expert=2 --logical logical_shardings.json -o -
  lowshard rules compare golden/ --rules ep-as-cp --devices 8 --ici expert=2
"""
FILES = """\
Rule files: the name of a ready-made one (default, pure-fsdp, ep-as-cp, cp-as-ep, ep-as-dp, shard-exp-on-fsdp,
pipeline-large-moe, fsdp-as-dp-for-attn, fsdp-as-dp-for-attn-cp-as-ep-for-moe and its -eval) or a path.
Tensors: --logical, a logical_shardings.json as MaxText dumps it, or --checkpoint, safetensors whose names are given
logical axes by patterns (`lowshard: parameters:` in the rule file, else ready-made ones for Hugging Face names).
Sizes: --ici within a slice, --dcn across slices, each axis=size with commas; -1, once, takes what is left. Without
--ici, fsdp takes it; without --dcn, data. --dcn needs --slices.
"""
_DUMP = """\
Writes the named shardings (mesh, partition spec and shape of every tensor) in the form of MaxText's golden files,
byte for byte; with --activations, the activation file. Fails where MaxText fails: an axis the mesh lacks, a dim that
its axes do not divide, a name on two dims. In strict mode whatever silently changes the outcome fails too, and
warnings go to stderr.
"""
_COMPARE = """\
Compares two dumps of one kind (logical, named, activations), or two folders of dumps. Equal changes of layers and
optimizer moments are one entry. With --rules and --devices, B is left out: A is compared with what the rules give now
for the logical_shardings.json beside it.
"""
_EXPLAIN = """\
Says why a tensor is sharded as it is: for each dim the rule that won (file, line, column), the rules that were blocked
before it, and which axis, held by which dim and rule, blocked them.
"""
_CHECK = """\
Reports everything that is odd or wrong about a rule file, the sizes and the tensors: names without a rule, rules that
can never win or are blocked, axes the mesh lacks, sizes for absent axes, dims that are not divided (with the largest
size that fits), context_sharding at odds with the rules, a flat data_sharding, the memory budget.
"""
_EXITS = "Exit codes: 0 done, 1 failed, 2 wrong usage or a file that cannot be used."
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_MOST_WARNINGS = 5


def add_rules_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and the commands below it."""
    parser = subparsers.add_parser(
        "rules",
        help="mesh-and-rule files: dump, compare, explain, check",
        description=DESCRIPTION,
        epilog=f"{EXAMPLES}{FILES}{_EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, short: str, text: str, run: Callable[[argparse.Namespace], int], exits: str = _EXITS
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=short,
            description=text,
            epilog=f"{FILES}{exits}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(func=run)
        return sub

    dump = add("dump", "write the resolved shardings, as golden files", _DUMP, run_dump)
    _add_rules(dump, devices=True)
    _add_tensors(dump, activations="dump this activation file with the specs the rules give")
    dump.add_argument("--werror", action="store_true", help="in strict mode, warnings fail too")
    out_help = "where to write; - for standard output"
    dump.add_argument("-o", "--out", type=made_target_of, required=True, metavar="FILE", help=out_help)

    exits = "Exit codes: 0 the same, 1 different, 2 a file is missing or unusable."
    compare = add("compare", "what differs between two dumps", _COMPARE, run_compare, exits)
    compare.add_argument("a", metavar="A", help="a dump file, or a folder of dumps")
    compare.add_argument("b", metavar="B", nargs="?", help="the other one")
    _add_rules(compare, required=False)
    add_json_argument(compare)

    explain = add("explain", "why a tensor is sharded as it is", _EXPLAIN, run_explain)
    explain.add_argument(
        "tensor", metavar="TENSOR", nargs="?", help="a tensor's name, a part of it, or a pattern with *"
    )
    explain.add_argument(
        "--names", metavar="A,-,B", help="logical names in place of a tensor; - for a dim without one"
    )
    _add_rules(explain)
    _add_tensors(explain)

    exits = "Exit codes: 0 no errors, 1 errors (or, with --werror, warnings), 2 a file cannot be read."
    check = add("check", "everything odd or wrong, in one report", _CHECK, run_check, exits)
    _add_rules(check)
    _add_tensors(check, activations="check the logical names of this activation file too")
    check.add_argument(
        "--dtype", default="float32", help="of the tensors of a logical file (default float32)"
    )
    check.add_argument("--werror", action="store_true", help="warnings fail too")
    add_json_argument(check)


def _add_rules(parser: argparse.ArgumentParser, *, devices: bool = False, required: bool = True) -> None:
    add = parser.add_argument_group("rules and mesh").add_argument
    add("--rules", required=required, metavar="NAME|PATH", help="a ready-made rule file, or a YAML file")
    modes, merges = ("strict", "maxtext"), ("file", "names")
    add("--mode", choices=modes, default="strict", help="maxtext: silent where MaxText is (default strict)")
    base = "where keys come from that the file lacks (default: default)"
    add("--base", default="default", metavar="NAME|PATH", help=base)
    merge = "file: as custom_mesh_and_rule; names: as a model file or command line"
    add("--merge", choices=merges, default="file", help=merge)
    add("--devices", type=int, required=devices, metavar="N", help="devices, over all slices")
    slices = "groups of devices with fast links inside (default 1)"
    add("--slices", type=int, default=1, metavar="N", help=slices)
    add("--ici", type=_sizes_of, metavar="AXIS=N,...", help="sizes within a slice")
    add("--dcn", type=_sizes_of, metavar="AXIS=N,...", help="sizes across slices")


def _add_tensors(parser: argparse.ArgumentParser, activations: str = "") -> None:
    group = parser.add_argument_group("tensors")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--logical", metavar="FILE", help="a logical_shardings.json")
    which.add_argument("--checkpoint", metavar="FILE|FOLDER", help="safetensors; only headers are read")
    if activations:
        group.add_argument("--activations", metavar="FILE", help=activations)


def _sizes_of(text: str) -> dict[str, int]:
    """Return the sizes of `axis=number` with commas."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        try:
            size = int(number) if len(number) < 20 else None
        except ValueError:
            size = None
        if not name.strip() or size is None or name.strip() in sizes:
            raise argparse.ArgumentTypeError(
                f"sizes are name=number with commas, such as fsdp=-1,expert=4; got {text!r}"
            )
        sizes[name.strip()] = size
    return sizes


def run_dump(args: argparse.Namespace) -> int:
    """Write a named (or activation) file and return the exit code."""
    from lowshard.command_line import write_whole
    from lowshard.rules.finding import CheckReport
    from lowshard.rules.golden import activation_shardings, dump_text, named_shardings, read_dump

    rules, bound, mesh = _bound(args)
    if args.activations is not None:
        if args.logical or args.checkpoint:
            raise RulesError("dump writes one file: give --activations, or --logical, or --checkpoint")
        text = dump_text(activation_shardings(bound, mesh, read_dump(args.activations).activations()))
    else:
        tensors, findings = _read_tensors(bound, args)
        with busy("rules", "resolving"):
            if args.mode == "strict":
                report = CheckReport.of([*rules.check(tensors, **_sizes(args)).findings, *findings])
                console = make_console(stderr=True)
                _print_findings(report.warnings[:_MOST_WARNINGS], console)
                more = len(report.warnings) - _MOST_WARNINGS
                if more > 0:
                    console.print(f"... and {more} warnings more: see `lowshard rules check`", style="dim")
                report.raise_first()
                if args.werror and report.warnings:
                    raise report.warnings[0].error()
            text = dump_text(named_shardings(bound, mesh, tensors))
    if args.out == "-":
        sys.stdout.write(text)
    else:
        write_whole(Path(args.out), text.encode())
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Print what differs and return 0 (nothing), 1 (something)."""
    from rich.text import Text

    from lowshard.rules.comparison import compare_dumps
    from lowshard.rules.golden import (
        FILE_NAMES,
        activation_shardings,
        dump_text,
        named_shardings,
        parse_dump,
        read_dump,
    )

    a, whole = Path(args.a), os.path.isdir(args.a)
    if (args.b is None) != (args.rules is not None) or (args.b is None and args.devices is None):
        raise RulesError("compare takes A and B, or A with --rules and --devices")
    if args.b is None:
        _, bound, mesh = _bound(args)
        folder = a if whole else a.parent
        tensors = read_dump(folder / FILE_NAMES["logical"]).tensors()
        made = {folder / FILE_NAMES["named"] if whole else a: named_shardings(bound, mesh, tensors)}
        traced = folder / FILE_NAMES["activations"]
        if whole and os.path.exists(traced):
            made[traced] = activation_shardings(bound, mesh, read_dump(traced).activations())
        now = f"{args.rules} on {args.devices} devices"
        pairs = [(read_dump(path), parse_dump(dump_text(data), now)) for path, data in made.items()]
    else:
        names = [""]
        if whole and os.path.isdir(args.b):
            folders = (a, Path(args.b))
            names = [name for name in FILE_NAMES.values() if any(os.path.exists(f / name) for f in folders)]
            if not names:
                raise RulesError(
                    f"{a} and {args.b}: neither folder holds any of {', '.join(FILE_NAMES.values())}"
                )
        pairs = [(read_dump(a / name), read_dump(Path(args.b, name))) for name in names]
    found = [compare_dumps(one, other) for one, other in pairs]
    same = not any(comparison.changes for comparison in found)
    if not put_json(
        args.json, lambda: json.dumps({"same": same, "comparisons": [c.to_json() for c in found]}, indent=2)
    ):
        console = make_console()
        for line in "\n".join(map(str, found)).splitlines():
            style = "red" if line.startswith("    A ") else "green" if line.startswith("    B ") else ""
            console.print(Text(line, style=style), soft_wrap=True)
    return 0 if same else 1


def run_explain(args: argparse.Namespace) -> int:
    """Print why tensors are sharded as they are and return the exit code."""
    from rich.text import Text

    from lowshard.rules.logical_tensor import short_name

    if args.devices is not None:
        _, bound, mesh = _bound(args)
    else:
        bound, mesh = _load(args), None
    if (args.names is None) == (args.tensor is None):
        raise RulesError("explain takes a TENSOR (with --logical or --checkpoint), or --names embed,-,mlp")
    lines = []
    if args.names is not None:
        names = tuple(None if n in ("", "-") else n for n in args.names.split(","))
        lines += str(bound.explain(names, mesh=mesh)).splitlines()
    else:
        groups: dict[object, list[LogicalTensor]] = {}
        for tensor in _chosen(bound, args):
            key = (tensor.names, tensor.shape, id(bound.resolver(tensor.name)))
            groups.setdefault(key, []).append(tensor)
        for t, *others in groups.values():
            lines += str(bound.explain(t.names, t.shape, mesh, parameter=t.name)).splitlines()
            if others:
                more = f" and {len(others) - 4} more" if len(others) > 4 else ""
                lines.append(f"  the same: {', '.join(short_name(o.name) for o in others[:4])}{more}")
    console = make_console()
    for line in lines:
        style = "yellow" if line.startswith("    ") else "" if line.startswith(" ") else "bold"
        console.print(Text(line, style=style), soft_wrap=True)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print every finding and return 0 or 1."""
    from lowshard.rules.finding import CheckReport
    from lowshard.rules.golden import read_dump
    from lowshard.rules.loading import read_rules_file

    rules, report = read_rules_file(args.rules, mode=args.mode, base=args.base, merge=args.merge)
    if rules is not None:
        given = args.logical or args.checkpoint
        tensors, findings = _read_tensors(rules, args) if given else (None, [])
        activations = None
        if args.activations is not None:
            read = read_dump(args.activations).activations()
            activations = {a.key: (a.names, a.shape) for a in read if a.names is not None}
        with busy("rules", "checking"):
            checked = rules.check(tensors, activations=activations, dtype=args.dtype, **_sizes(args))
        report = CheckReport.of([*report.findings, *checked.findings, *findings])
    if not put_json(args.json, lambda: json.dumps(report.to_json(), indent=2)):
        console = make_console()
        _print_findings(report.findings, console)
        notes = len(report.findings) - len(report.errors) - len(report.warnings)
        counts = {"error": len(report.errors), "warning": len(report.warnings), "note": notes}
        style = "bold red" if report.errors else "bold green"
        console.print(", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items()), style=style)
    return 1 if report.errors or (args.werror and report.warnings) else 0


def _print_findings(findings: Iterable[Finding], console: Console) -> None:
    from rich.text import Text

    for finding in findings:
        console.print(Text(str(finding), style=_STYLES[finding.severity]), soft_wrap=True)


def _load(args: argparse.Namespace) -> RuleSet:
    from lowshard.rules.loading import load_rules

    if args.devices is None and (args.ici or args.dcn or args.slices != 1):
        raise RulesError("--ici, --dcn and --slices say something about devices: give --devices too")
    return load_rules(args.rules, mode=args.mode, base=args.base, merge=args.merge)


def _bound(args: argparse.Namespace) -> tuple[RuleSet, RuleSet, DeviceMesh]:
    """Return the rules as in the file, and as they hold on the mesh of the requested sizes."""
    rules = _load(args)
    return rules, *rules.bind(args.devices, args.ici, args.slices, args.dcn)


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    return {"devices": args.devices, "slices": args.slices, "ici": args.ici, "dcn": args.dcn}


def _read_tensors(
    rules: RuleSet, args: argparse.Namespace
) -> tuple[tuple[LogicalTensor, ...], list[Finding]]:
    """Return the requested tensors, and findings about their names."""
    from lowshard.rules.golden import read_dump

    if args.logical is not None:
        return read_dump(args.logical).tensors(getattr(args, "dtype", "float32")), []
    if args.checkpoint is not None:
        return checkpoint_tensors(rules, args.checkpoint)
    raise RulesError("which tensors? give --logical logical_shardings.json or --checkpoint model.safetensors")


def checkpoint_tensors(
    rules: RuleSet, path: str | os.PathLike[str]
) -> tuple[tuple[LogicalTensor, ...], list[Finding]]:
    """Return the tensors of a checkpoint with logical names by pattern, and what has none; see `name_tensors`."""
    from lowshard.checkpoint.catalog import Catalog
    from lowshard.checkpoint.checkpoint_index import HF_INDEX, INDEX_NAME
    from lowshard.checkpoint.header import read_header
    from lowshard.rules.checkpoint_rules import name_tensors

    folder = Path(path)
    if any(os.path.exists(folder / name) for name in (INDEX_NAME, HF_INDEX)):
        catalog = Catalog.open(folder)
        return name_tensors(rules, {name: (t.shape, t.dtype) for name, t in sorted(catalog.tensors.items())})
    paths = sorted(folder.glob("*.safetensors")) if os.path.isdir(folder) else [folder]
    if not paths:
        raise CheckpointError(f"{folder}: the folder holds no .safetensors file")
    shapes: dict[str, tuple[tuple[int, ...], object]] = {}
    for file in paths:
        for name, entry in read_header(file).tensors.items():
            if name in shapes:
                raise CheckpointError(f"{file}: tensor {name!r} stands in another file of the folder too")
            shapes[name] = (entry.shape, entry.dtype)
    return name_tensors(rules, dict(sorted(shapes.items())))


def _chosen(rules: RuleSet, args: argparse.Namespace) -> list[LogicalTensor]:
    """Return the tensors that TENSOR names: exactly, by pattern, or as a part of their short name."""
    from lowshard.rules.extension import matches
    from lowshard.rules.logical_tensor import short_name

    tensors, _ = _read_tensors(rules, args)
    wanted = args.tensor
    names = {t: (t.name, short_name(t.name)) for t in tensors}
    found = [t for t, both in names.items() if wanted in both]
    for pattern in (wanted, f"*{wanted}*"):
        found = found or [t for t, both in names.items() if any(matches(pattern, n) for n in both)]
    if not found:
        parts = wanted.count("/") + 1  # a name may be given by its last parts
        ends = ("/".join(short.split("/")[-parts:]) for _, short in names.values())
        hint = nearest(wanted, (short for _, short in names.values()), alike=0.4) or nearest(wanted, ends)
        raise RulesError(f"none of the {len(tensors)} tensors is called {wanted!r}{hint}")
    return found
