"""The command `lowshard doctor`: what is installed, what works, and what to do about the rest.

Libraries are imported, and GPUs asked, in child processes: one that crashes on import is a finding, not the end
of the doctor.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict

from lowshard.launch.check_library import check_kernels, check_libraries, check_loaded, check_lowshard
from lowshard.launch.check_machine import check_cuda, check_gpus, check_machine
from lowshard.launch.check_mpi import check_autogroup, check_fake_hosts, check_mpi, check_sharing
from lowshard.launch.doctor_finding import Check
from lowshard.settings import SETTINGS

__all__ = ["Check", "add_doctor_parser", "doctor", "examine"]

_PIPED_WIDTH = 80
_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "red"}


def add_doctor_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds `doctor` to a command line; the parsed arguments carry the function to call as `func`."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what works, what to do about the rest",
        description="Looks at the installation and starts two ranks. Exit code 0 if the CPU path works, else 1.",
        epilog="examples:\n"
        "  lowshard doctor             a line for each thing looked at, and below it what to do\n"
        "  lowshard doctor --json      the same for programs\n"
        "  lowshard doctor --settings  every environment variable that lowshard reads",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument(
        "--settings", action="store_true", help="print the environment variables and their values"
    )
    parser.set_defaults(func=doctor)
    return parser


def doctor(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if the CPU path works, else 1."""
    if args.settings:
        _print_settings(args.json)
        return 0
    checks = examine()
    works = all(check.status == "ok" for check in checks if check.required)
    if args.json:
        print(json.dumps({"cpu_path_works": works, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print_table(checks, works)
    return 0 if works else 1


def examine() -> list[Check]:
    """Looks at everything; never raises for what it finds."""
    checks = [
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}", required=True),
        check_lowshard(),
    ]
    libraries = check_libraries()
    checks += [*libraries, *check_loaded(), check_kernels()]
    found, mpi = check_mpi()
    checks += [
        *found,
        check_sharing(),
        *check_machine(),
        check_autogroup(mpi),
        check_fake_hosts(),
        check_cuda(),
    ]
    if any(check.name == "cupy" and check.status == "ok" for check in libraries):
        checks += check_gpus()
    else:
        checks.append(Check("nccl", "missing", "looked for through CuPy", "for GPUs: install CuPy first"))
        checks.append(Check("gpus", "missing", "looked for through CuPy", "for GPUs: install CuPy first"))
    return checks


def _print_settings(as_json: bool) -> None:
    """Prints each setting with what it may be, what it is now and what it means."""
    if as_json:
        rows = [
            {"name": s.name, "value": s.text(), "is_set": s.is_set(), "default": s.default, "values": s.values,
             "meaning": s.meaning}
            for s in SETTINGS
        ]  # fmt: skip
        print(json.dumps(rows, indent=2))
        return
    for setting in SETTINGS:
        now = f"{setting.text()!r}, from the environment" if setting.is_set() else repr(setting.default)
        print(f"{setting.name} = {now}\n    {setting.meaning} ({setting.values})")


def print_table(checks: list[Check], works: bool) -> None:
    """Prints what was found and, below it, what to do: as a table with rich, a line each without."""
    verdict = "The CPU path works." if works else "The CPU path does NOT work: see the lines marked * above."
    if any(check.name == "rich" and check.status != "ok" for check in checks):
        for check in checks:
            mark = "*" if check.required and check.status != "ok" else " "
            print(f"{check.status:8}{mark}{check.name:14} {check.detail} {check.advice}".rstrip())
        print(verdict)
        return
    from rich.table import Table
    from rich.text import Text

    from lowshard.plain_console import make_console

    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found"):
        table.add_column(title, overflow="fold")
    for check in checks:
        mark = " *" if check.required and check.status != "ok" else ""
        status = Text(check.status + mark, style=_STYLES[check.status])
        found = Text(check.detail)
        if check.advice:
            found.append(f"\n-> {check.advice}", style="bold")
        table.add_row(status, Text(check.name), found)
    console = make_console(piped_width=_PIPED_WIDTH)
    console.print(table)
    console.print(verdict)
