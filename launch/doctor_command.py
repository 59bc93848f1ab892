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

from lowshard.launch.check_library import check_kernels, check_libraries, check_lowshard
from lowshard.launch.check_machine import check_cuda, check_gpus, check_machine
from lowshard.launch.check_mpi import check_mpi, check_sharing
from lowshard.launch.doctor_finding import Check
from lowshard.plain_console import add_json_argument, put_json
from lowshard.settings import SETTINGS

__all__ = ["Check", "add_doctor_parser", "doctor", "examine"]


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
    add_json_argument(parser)
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
    found = {"cpu_path_works": works, "checks": [asdict(check) for check in checks]}
    if not put_json(args.json, lambda: json.dumps(found, indent=2)):
        print_table(checks, works)
    return 0 if works else 1


def examine() -> list[Check]:
    """Looks at everything; never raises for what it finds."""
    libraries = check_libraries()
    checks = [
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}", required=True),
        check_lowshard(),
        *libraries,
        check_kernels(),
        *check_mpi(),
        check_sharing(),
        *check_machine(),
        check_cuda(),
    ]
    if any(check.name == "cupy" and check.status == "ok" for check in libraries):
        return [*checks, *check_gpus()]
    advice = "for GPUs: install CuPy first"
    return [
        *checks,
        *(Check(name, "missing", "looked for through CuPy", advice) for name in ("nccl", "gpus")),
    ]


def _print_settings(target: str | None) -> None:
    """Prints each setting with what it may be, what it is now and what it means."""
    rows = [
        {"name": s.name, "value": s.text(), "is_set": s.is_set(), "default": s.default, "values": s.values,
         "meaning": s.meaning}
        for s in SETTINGS
    ]  # fmt: skip
    if put_json(target, lambda: json.dumps(rows, indent=2)):
        return
    for setting in SETTINGS:
        now = f"{setting.text()!r}, from the environment" if setting.is_set() else repr(setting.default)
        print(f"{setting.name} = {now}\n    {setting.meaning} ({setting.values})")


def print_table(checks: list[Check], works: bool) -> None:
    """Prints what was found and, below it, what to do."""
    for check in checks:
        mark = "*" if check.required and check.status != "ok" else " "
        print(f"{check.status:8}{mark} {check.name:14} {check.detail}")
        if check.advice:
            print(f"{'':25}-> {check.advice}")
    print("The CPU path works." if works else "The CPU path does NOT work: see the lines marked * above.")
