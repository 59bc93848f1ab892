"""`lowshard rules`: dump, compare, explain, check, memory, show, example."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lowshard.errors import RulesError
from lowshard.flag_value import file_of, folder_of, made_target_of
from lowshard.plain_console import busy, make_console
from lowshard.rules.command_arguments import (
    FILES,
    add_json_argument,
    add_rules_arguments,
    add_tensor_arguments,
    bind,
    chosen_tensors,
    dump_pairs,
    joined,
    load,
    parse_integers,
    parse_places,
    read_tensors,
    sizes_of,
)

if TYPE_CHECKING:
    from lowshard.rules.comparison import Comparison
    from lowshard.rules.explanation import Explanation
    from lowshard.rules.logical_tensor import LogicalTensor

DESCRIPTION = """\
Mesh-and-rule files: which mesh axes cut which dims of which tensors. The files are MaxText's (mesh_axes,
data_sharding, logical_axis_rules) and are resolved as MaxText resolves them; no device is touched, no array made.
"""
EXAMPLES = """\
examples:
  lowshard rules example                  # writes the files that the other lines name
  lowshard rules check   --rules my.yml --devices 16 --ici fsdp=-1,expert=4 --logical logical_shardings.json
  lowshard rules explain moe/wi_0 --rules default --logical logical_shardings.json
  lowshard rules memory  --rules ep-as-cp --devices 8 --ici expert=2 --checkpoint model.safetensors
  lowshard rules show    q_proj --rules ep-as-cp --devices 8 --ici expert=2 --checkpoint model.safetensors
  lowshard rules dump    --rules ep-as-cp --devices 8 --ici expert=2 --logical logical_shardings.json -o -
  lowshard rules compare golden/ --rules ep-as-cp --devices 8 --ici expert=2
"""
_DUMP = """\
Writes the named shardings (mesh, partition spec and shape of every tensor) in the form of MaxText's golden files,
byte for byte; with --activations, the activation file. Fails where MaxText fails: an axis the mesh lacks, a dim that
its axes do not divide, a name on two dims. In strict mode whatever silently changes the outcome fails too, and
warnings go to stderr.
"""
_COMPARE = """\
Compares two dumps of one kind (logical, named, activations), a logical with a named one (keys and shapes), or two
folders of dumps. Equal changes are one entry over layers and optimizer moments, with the bytes a device they cost.
With --rules and --devices, B is left out: A is compared with what the rules give now for the logical_shardings.json
beside it.
"""
_EXPLAIN = """\
Says why a tensor is cut as it is: for each dim the rule that won (file, line, column), every rule tried before it, and
which axis, held by which dim and rule, blocked that.
"""
_CHECK = """\
Reports everything that is odd or wrong about a rule file, the sizes and the tensors: names without a rule, rules that
can never win or are blocked, axes the mesh lacks, sizes for absent axes, dims that are not divided (with the largest
size that fits), context_sharding at odds with the rules, a flat data_sharding, the memory budget.
"""
_MEMORY = """\
Adds up bytes a device by group: parameters, gradients, moments; says what is replicated and what that costs.
"""
_SHOW = """\
Shows which rank holds which part of a tensor: any two dims, as coloured text and as a picture; axes of size 1 hidden.
"""
_EXAMPLE = """\
Writes small files to try the other commands on, into DIR (default: here): my.yml, a rule file; logical_shardings.json,
a mixture of experts as MaxText dumps it; model.safetensors, one of Hugging Face's names (zeros); golden/, what the
ready-made rules ep-as-cp give for 8 devices. Nothing is overwritten.
"""
_EXITS = "Exit codes: 0 done, 1 failed, 2 wrong usage or a file that cannot be used."


def add_rules_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and the commands below it."""
    parser = subparsers.add_parser(
        "rules",
        help="mesh-and-rule files: dump, compare, explain, check, memory, show, example",
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
    add_rules_arguments(dump, devices=True)
    add_tensor_arguments(dump, activations="dump this activation file with the specs the rules give")
    dump.add_argument("--werror", action="store_true", help="in strict mode, warnings fail too")
    dump.add_argument(
        "-o",
        "--out",
        type=made_target_of,
        required=True,
        metavar="FILE",
        help="where to write; - for standard output",
    )

    compare = add(
        "compare",
        "what differs between two dumps, and what it costs",
        _COMPARE,
        run_compare,
        "Exit codes: 0 the same, 1 different, 2 a file is missing or unusable.",
    )
    compare.add_argument("a", metavar="A", help="a dump file, or a folder of dumps")
    compare.add_argument("b", metavar="B", nargs="?", help="the other one")
    add_rules_arguments(compare, devices=False, required=False)
    compare.add_argument("--dtype", default="float32", help="of the tensors, for bytes (default float32)")
    add_json_argument(compare)

    explain = add(
        "explain",
        "why a tensor is cut as it is",
        _EXPLAIN,
        run_explain,
    )
    explain.add_argument(
        "tensor", metavar="TENSOR", nargs="?", help="a tensor's name, a part of it, or a pattern with *"
    )
    explain.add_argument(
        "--names", metavar="A,-,B", help="logical names in place of a tensor; - for a dim without one"
    )
    add_rules_arguments(explain, devices=False)
    add_tensor_arguments(explain)
    add_json_argument(explain)

    check = add(
        "check",
        "everything odd or wrong, in one report",
        _CHECK,
        run_check,
        "Exit codes: 0 no errors, 1 errors (or, with --werror, warnings), 2 a file cannot be read.",
    )
    add_rules_arguments(check, devices=False)
    add_tensor_arguments(check, activations="check the logical names of this activation file too")
    check.add_argument("--werror", action="store_true", help="warnings fail too")
    add_json_argument(check)

    memory = add(
        "memory",
        "bytes a device, and what replication costs",
        _MEMORY,
        run_memory,
    )
    add_rules_arguments(memory, devices=True)
    add_tensor_arguments(memory)
    memory.add_argument("--gradient-dtype", metavar="DTYPE", help="default: as the parameter")
    memory.add_argument("--moment-dtype", metavar="DTYPE", help="default: as the parameter")
    memory.add_argument(
        "--moments",
        type=int,
        default=2,
        metavar="N",
        help="moments of the optimizer, where the file has none (default 2)",
    )
    memory.add_argument(
        "--budget",
        type=float,
        metavar="BYTES",
        help="bytes a device may use, such as 80e9; beyond it the exit code is 1",
    )
    add_json_argument(memory)

    example = add("example", "write small files to try these commands on", _EXAMPLE, run_example)
    example.add_argument(
        "folder", type=folder_of, metavar="DIR", nargs="?", default=".", help="where to (default: here)"
    )

    show = add(
        "show",
        "which rank holds which part",
        _SHOW,
        run_show,
    )
    show.add_argument("tensor", metavar="TENSOR", help="a tensor's name, a part of it, or a pattern with *")
    add_rules_arguments(show, devices=True)
    add_tensor_arguments(show)
    show.add_argument(
        "--dims", metavar="D,D", help="the dims that run down and across (default: the two cut most)"
    )
    show.add_argument("--at", metavar="D=I,...", help="index of the dims that stand still (default 0)")
    show.add_argument("--rank", type=int, metavar="R", help="show the slice that rank R holds")
    show.add_argument(
        "--most",
        type=int,
        default=24,
        metavar="N",
        help="rows and columns beyond which the middle is left out (default 24)",
    )
    show.add_argument("--picture", type=file_of, metavar="FILE", help="draw it too, into a .png or .svg")
    add_json_argument(show)


def run_dump(args: argparse.Namespace) -> int:
    """Write a named (or activation) file and return the exit code."""
    from lowshard.rules.golden import activation_shardings, dump_text, named_shardings, read_dump
    from lowshard.rules.rules_text import print_warnings

    rules = load(args)
    bound, mesh = bind(rules, args)
    if args.activations is not None:
        if args.logical or args.checkpoint:
            raise RulesError("dump writes one file: give --activations, or --logical, or --checkpoint")
        text = dump_text(activation_shardings(bound, mesh, read_dump(args.activations).activations()))
    else:
        tensors, findings = read_tensors(bound, args)
        with busy("rules", "resolving"):
            if args.mode == "strict":
                report = joined(rules.check(tensors, **sizes_of(args)), findings)
                print_warnings(report, make_console(stderr=True))
                report.raise_first()
                if args.werror and report.warnings:
                    raise report.warnings[0].error()
            text = dump_text(named_shardings(bound, mesh, tensors))
    _write(args.out, text)
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Print what differs and return 0 (nothing), 1 (something)."""
    from lowshard.rules.comparison import compare_dumps
    from lowshard.rules.golden import read_dump
    from lowshard.rules.rules_text import print_comparison

    if (args.b is None) != (args.rules is not None):
        raise RulesError("compare takes A and B, or A with --rules and --devices")
    found: list[Comparison] = []
    lacking: list[str] = []
    if args.b is None:
        found = _against_rules(args)
    else:
        for a, b in dump_pairs(Path(args.a), Path(args.b), lacking):
            found.append(compare_dumps(read_dump(a), read_dump(b), dtype=args.dtype))
    if args.json:
        print(json.dumps({"same": not lacking and all(c.same for c in found), "lacking": lacking,
                          "comparisons": [c.to_json() for c in found]}, indent=2))  # fmt: skip
    else:
        console = make_console()
        for comparison in found:
            print_comparison(comparison, console)
        for path in lacking:
            console.print(f"missing: {path}", style="bold red", soft_wrap=True)
    return 0 if not lacking and all(c.same for c in found) else 1


def run_explain(args: argparse.Namespace) -> int:
    """Print why tensors are cut as they are and return the exit code."""
    from lowshard.rules.logical_tensor import short_name
    from lowshard.rules.rules_text import print_explanation

    rules = load(args)
    bound, mesh = bind(rules, args) if args.devices is not None else (rules, None)
    if args.names is not None:
        if args.tensor is not None:
            raise RulesError("explain takes a TENSOR (with --logical or --checkpoint) or --names, not both")
        names = tuple(None if n in ("", "-") else n for n in args.names.split(","))
        shown: list[tuple[Explanation, list[str]]] = [(bound.explain(names, mesh=mesh), [])]
    elif args.tensor is None:
        raise RulesError("explain takes a TENSOR (with --logical or --checkpoint) or --names embed,-,mlp")
    else:
        groups: dict[object, list[LogicalTensor]] = {}
        for tensor in chosen_tensors(bound, args):
            key = (tensor.names, tensor.shape, id(bound.resolver(tensor.name)))
            groups.setdefault(key, []).append(tensor)
        shown = [
            (bound.explain(t.names, t.shape, mesh, parameter=t.name), [short_name(o.name) for o in rest])
            for t, *rest in groups.values()
        ]
    if args.json:
        print(json.dumps([e.to_json() | {"same": others} for e, others in shown], indent=2))
        return 0
    console = make_console()
    for explanation, others in shown:
        print_explanation(explanation, others, console)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print every finding and return 0 or 1."""
    from lowshard.rules.finding import CheckReport
    from lowshard.rules.golden import read_dump
    from lowshard.rules.loading import read_rules_file
    from lowshard.rules.rules_text import print_check

    rules, report = read_rules_file(args.rules, mode=args.mode, base=args.base, merge=args.merge)
    if rules is not None:
        given = args.logical or args.checkpoint
        tensors, findings = read_tensors(rules, args) if given else (None, [])
        activations = None
        if args.activations is not None:
            read = read_dump(args.activations).activations()
            activations = {a.key: (a.names, a.shape) for a in read if a.names is not None}
        with busy("rules", "checking"):
            checked = rules.check(tensors, activations=activations, dtype=args.dtype, **sizes_of(args))
        report = CheckReport.of([*report.findings, *checked.findings, *findings])
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_check(report, make_console())
    return 1 if report.errors or (args.werror and report.warnings) else 0


def run_example(args: argparse.Namespace) -> int:
    """Write the example files and return the exit code."""
    from lowshard.rules.example_files import write_examples

    for path in write_examples(args.folder):
        print(path)
    rules, logical = (shlex.quote(str(args.folder / name)) for name in ("my.yml", "logical_shardings.json"))
    print(f"Try: lowshard rules check --rules {rules} --devices 16 --logical {logical}")
    return 0


def run_memory(args: argparse.Namespace) -> int:
    """Print bytes a device and return 0, or 1 beyond the budget."""
    from dataclasses import replace

    from lowshard.rules.rules_text import print_memory

    rules = load(args)
    if args.budget is not None:
        if not args.budget > 0:
            raise RulesError(f"--budget is a number of bytes > 0, got {args.budget:g}")
        extension = replace(rules.extension, memory_budget_bytes_per_device=args.budget)
        rules = replace(rules, extension=extension)
    bound, mesh = bind(rules, args)
    tensors, _ = read_tensors(bound, args)
    with busy("rules", "adding up"):
        report = bound.memory(
            mesh, tensors, dtype=args.dtype, gradient_dtype=args.gradient_dtype, moment_dtype=args.moment_dtype,
            moments=args.moments,
        )  # fmt: skip
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_memory(report, make_console())
    return 0 if report.within_budget else 1


def run_show(args: argparse.Namespace) -> int:
    """Print who holds what of one tensor and return the exit code."""
    from lowshard.layout import Layout
    from lowshard.rules.holding import find_holding
    from lowshard.rules.logical_tensor import short_name
    from lowshard.rules.rules_text import print_holding

    bound, mesh = bind(load(args), args)
    tensor = chosen_tensors(bound, args)[0]
    found = bound.bound_spec(mesh, tensor.names, tensor.shape, parameter=tensor.name, uneven=True)
    layout = Layout.from_spec(mesh, tensor.shape, tensor.dtype, found.spec)
    dims = None
    if args.dims is not None:
        pair = parse_integers("--dims", args.dims)
        if len(pair) != 2:
            raise RulesError(f"--dims takes two dims such as 0,2, got {args.dims!r}")
        dims = (pair[0], pair[1])
    at = parse_places(args.at) if args.at else None
    holding = find_holding(layout, short_name(tensor.name), dims, at, args.rank)
    if args.picture is not None:
        from lowshard.rules.holding_picture import draw_holding

        draw_holding(holding, args.picture)
    if args.json:
        print(json.dumps(holding.to_json(), indent=2))
        return 0
    if args.most < 2:
        raise RulesError(f"--most is at least 2, got {args.most}")
    print_holding(holding, make_console(), args.most)
    if args.picture is not None:
        print(f"written: {args.picture}")
    return 0


def _against_rules(args: argparse.Namespace) -> list[Comparison]:
    """Compare golden files with what the rules give now."""
    from lowshard.rules.comparison import compare_dumps
    from lowshard.rules.golden import parse_dump, read_dump
    from lowshard.rules.testing import made_goldens

    if args.devices is None:
        raise RulesError("compare with --rules takes --devices too")
    bound, mesh = bind(load(args), args)
    now = f"{args.rules} on {args.devices} devices"
    return [
        compare_dumps(read_dump(path), parse_dump(text, now), dtype=args.dtype)
        for path, text in made_goldens(bound, mesh, args.a).items()
    ]


def _write(out: str, text: str) -> None:
    from lowshard.flag_value import write_whole

    if out == "-":
        sys.stdout.write(text)
        return
    write_whole(Path(out), text.encode())
