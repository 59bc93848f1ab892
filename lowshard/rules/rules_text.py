"""What the `lowshard rules` commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowshard.rules.comparison import Comparison
from lowshard.rules.explanation import Explanation
from lowshard.rules.finding import CheckReport, Finding

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_check(report: CheckReport, console: Console) -> None:
    """Print every finding, worst first, and the count of each kind."""
    for finding in report.findings:
        _print_finding(finding, console)
    notes = len(report.findings) - len(report.errors) - len(report.warnings)
    console.print(
        f"{_count(len(report.errors), 'error')}, {_count(len(report.warnings), 'warning')}, {_count(notes, 'note')}",
        style="bold red" if report.errors else "bold green",
    )


def print_warnings(report: CheckReport, console: Console, most: int = 5) -> None:
    """Print the first warnings of a command that goes on."""
    for finding in report.warnings[:most]:
        _print_finding(finding, console)
    if len(report.warnings) > most:
        console.print(
            f"... and {len(report.warnings) - most} warnings more: see `lowshard rules check`", style="dim"
        )


def _print_finding(finding: Finding, console: Console) -> None:
    from rich.text import Text

    place = f"{finding.where}: " if finding.where else ""
    named = f"rule {finding.rule}: " if finding.rule is not None else ""
    text = Text.assemble(
        (f"{finding.severity}: ", _STYLES[finding.severity]), (place, "cyan"), named, finding.text,
        (f"  [{finding.code}]", "dim"),
    )  # fmt: skip
    console.print(text, soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs, grouped."""
    from rich.text import Text

    for line in str(comparison).splitlines():
        style = "red" if line.startswith("    A ") else "green" if line.startswith("    B ") else ""
        console.print(Text(line, style=style), soft_wrap=True)


def print_explanation(explanation: Explanation, others: Sequence[str], console: Console) -> None:
    """Print why a tensor is cut as it is, and which other tensors are cut the same way."""
    from rich.text import Text

    for line in str(explanation).splitlines():
        style = (
            "bold" if not line.startswith(" ") else "yellow" if line.startswith("    blocked") else
            "bold red" if line.startswith("    PROBLEM") else "dim" if line.startswith("    ") else ""
        )  # fmt: skip
        console.print(Text(line, style=style), soft_wrap=True)
    if others:
        shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        console.print(Text(f"  the same: {shown}", style="dim"), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
