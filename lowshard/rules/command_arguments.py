"""What the `lowshard rules` commands share: arguments, and what is read by them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.errors import RulesError
from lowshard.nearest import nearest

if TYPE_CHECKING:
    from lowshard.mesh import DeviceMesh
    from lowshard.rules.finding import CheckReport, Finding
    from lowshard.rules.logical_tensor import LogicalTensor
    from lowshard.rules.ruleset import RuleSet

FILES = """\
Rule files: the name of a ready-made one (default, pure-fsdp, ep-as-cp, cp-as-ep, ep-as-dp, shard-exp-on-fsdp,
pipeline-large-moe) or a path.
Tensors: --logical, a logical_shardings.json as MaxText dumps it, or --checkpoint, safetensors whose names are given
logical axes by patterns (`lowshard: parameters:` in the rule file, else ready-made ones for Hugging Face names).
Sizes: --ici within a slice, --dcn across slices, each axis=size with commas; -1, once, takes what is left. Without
--ici, fsdp takes it; without --dcn, data.
"""


def add_rules_arguments(parser: argparse.ArgumentParser, *, devices: bool, required: bool = True) -> None:
    """Add what names the rules and the mesh."""
    group = parser.add_argument_group("rules and mesh")
    group.add_argument(
        "--rules", required=required, metavar="NAME|PATH", help="a ready-made rule file, or a YAML file"
    )
    group.add_argument(
        "--mode",
        choices=("strict", "maxtext"),
        default="strict",
        help="maxtext: silent where MaxText is (default strict)",
    )
    group.add_argument(
        "--base",
        default="default",
        metavar="NAME|PATH",
        help="where keys come from that the file lacks (default: default)",
    )
    group.add_argument(
        "--merge",
        choices=("file", "names"),
        default="file",
        help="file: as custom_mesh_and_rule; names: as a model file or command line",
    )
    group.add_argument("--devices", type=int, required=devices, metavar="N", help="devices, over all slices")
    group.add_argument(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="groups of devices with fast links inside (default 1)",
    )
    group.add_argument("--ici", type=parse_sizes, metavar="AXIS=N,...", help="sizes within a slice")
    group.add_argument("--dcn", type=parse_sizes, metavar="AXIS=N,...", help="sizes across slices")


def add_tensor_arguments(parser: argparse.ArgumentParser, activations: str = "") -> None:
    """Add what names the tensors; `activations`: the help of --activations, where there is one."""
    group = parser.add_argument_group("tensors")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--logical", metavar="FILE", help="a logical_shardings.json")
    which.add_argument("--checkpoint", metavar="FILE|FOLDER", help="safetensors; only headers are read")
    if activations:
        group.add_argument("--activations", metavar="FILE", help=activations)
    group.add_argument(
        "--dtype", default="float32", help="of the tensors of a logical file (default float32)"
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_sizes(text: str) -> dict[str, int]:
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


def load(args: argparse.Namespace) -> RuleSet:
    """Return the rules that are asked for."""
    from lowshard.rules.loading import load_rules

    if args.devices is None and (args.ici or args.dcn or args.slices != 1):
        raise RulesError("--ici, --dcn and --slices say something about devices: give --devices too")
    return load_rules(args.rules, mode=args.mode, base=args.base, merge=args.merge)


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that are asked for, as `RuleSet.check` takes them."""
    return {"devices": args.devices, "slices": args.slices, "ici": args.ici, "dcn": args.dcn}


def bind(rules: RuleSet, args: argparse.Namespace) -> tuple[RuleSet, DeviceMesh]:
    """Return the rules and the mesh of the sizes that are asked for."""
    return rules.bind(args.devices, args.ici, args.slices, args.dcn)


def read_tensors(rules: RuleSet, args: argparse.Namespace) -> tuple[tuple[LogicalTensor, ...], list[Finding]]:
    """Return the tensors that are asked for, and what is odd about their names."""
    from lowshard.rules.checkpoint_names import checkpoint_tensors
    from lowshard.rules.golden import read_dump

    if args.logical is not None:
        return read_dump(args.logical).tensors(args.dtype), []
    if args.checkpoint is not None:
        return checkpoint_tensors(rules, args.checkpoint)
    raise RulesError("which tensors? give --logical logical_shardings.json or --checkpoint model.safetensors")


def chosen_tensors(rules: RuleSet, args: argparse.Namespace) -> list[LogicalTensor]:
    """Return the tensors that TENSOR names: exactly, by pattern, or as a part of their short name."""
    from lowshard.rules.extension import matches
    from lowshard.rules.logical_tensor import short_name

    tensors, _ = read_tensors(rules, args)
    wanted = args.tensor
    names = {t: (t.name, short_name(t.name)) for t in tensors}
    exact = [t for t, both in names.items() if wanted in both]
    if exact:
        return exact
    found: list[LogicalTensor] = []
    for pattern in (wanted, f"*{wanted}*"):
        found = found or [t for t, both in names.items() if any(matches(pattern, n) for n in both)]
    if not found:
        parts = wanted.count("/") + 1  # a name may be given by its last parts
        ends = ("/".join(short.split("/")[-parts:]) for _, short in names.values())
        hint = nearest(wanted, (short for _, short in names.values()), alike=0.4) or nearest(wanted, ends)
        raise RulesError(f"none of the {len(tensors)} tensors is called {wanted!r}{hint}")
    return found


def joined(report: CheckReport, findings: list[Finding]) -> CheckReport:
    """Return a report with findings added."""
    return type(report).of([*report.findings, *findings])


def dump_pairs(a: Path, b: Path, lacking: list[str]) -> list[tuple[Path, Path]]:
    """Return the files to compare; of two folders, each dump that either has."""
    from lowshard.rules.golden import FILE_NAMES

    for path in (a, b):
        if not os.path.exists(path):
            raise RulesError(f"{path}: there is no such file or folder", path=str(path))
    if not os.path.isdir(a) and not os.path.isdir(b):
        return [(a, b)]
    if os.path.isdir(a) != os.path.isdir(b):
        raise RulesError(f"two files or two folders are compared, got {a} and {b}")
    pairs = []
    for name in FILE_NAMES.values():
        here, there = os.path.exists(a / name), os.path.exists(b / name)
        if here and there:
            pairs.append((a / name, b / name))
        elif here or there:
            lacking.append(str((b if here else a) / name))
    if not pairs and not lacking:
        raise RulesError(f"{a} and {b}: neither folder holds any of {', '.join(FILE_NAMES.values())}")
    return pairs
