"""What the `lowshard rules` commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowshard.rules.comparison import Comparison
from lowshard.rules.explanation import Explanation
from lowshard.rules.finding import CheckReport, Finding
from lowshard.rules.holding import Holding, holding_table
from lowshard.rules.resolution import entry_axes

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


def print_holding(holding: Holding, console: Console, most: int) -> None:
    """Print who holds what: the header lines, then the grid."""
    from rich.text import Text

    for place, line in enumerate(holding.header()):
        console.print(Text(line, style="bold" if place == 0 else ""))
    console.print(holding_table(holding, most))
    ranks = {len(c) for row in holding.cells for c in row}
    idle = holding.layout.mesh.size - sum(len(c) for row in holding.cells for c in row)
    copies = f"{min(ranks)}" if len(ranks) == 1 else f"{min(ranks)} to {max(ranks)}"
    elsewhere = f"; {idle} ranks hold other parts" if idle else ""
    cut = sum(bool(entry_axes(e)) for e in holding.layout.spec)
    console.print(
        f"each cell lies on {copies} rank(s){elsewhere}; {cut} of {holding.layout.ndim} dims name axes",
        style="dim",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
