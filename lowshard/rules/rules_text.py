"""What the `lowshard rules` commands print for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowshard.rules.comparison import Comparison
from lowshard.rules.explanation import Explanation
from lowshard.rules.finding import CheckReport, Finding
from lowshard.rules.holding import Holding, holding_table
from lowshard.rules.memory_report import MemoryReport
from lowshard.rules.resolution import entry_axes

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_MOST_GROUPS = 30


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


def print_memory(report: MemoryReport, console: Console) -> None:
    """Print bytes a device by group, what is replicated, and the sums."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameters", overflow="fold")
    for name in (
        "tensors",
        "elements",
        "shards",
        "parameter MB",
        "gradient MB",
        "moment MB",
        "replication MB",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for group in report.groups[:_MOST_GROUPS]:
        replicated = group.shards < report.mesh.size
        table.add_row(
            group.name, str(group.tensors), f"{group.elems:,}", str(group.shards), _mb(group.parameter_bytes),
            _mb(group.gradient_bytes), _mb(group.moment_bytes),
            _mb(group.replication_bytes) if group.replication_bytes else "-",
            style="yellow" if replicated and group.replication_bytes else None,
        )  # fmt: skip
    rest = report.groups[_MOST_GROUPS:]
    if rest:
        table.add_row(
            f"{len(rest)} more", str(sum(g.tensors for g in rest)), f"{sum(g.elems for g in rest):,}", "",
            _mb(sum(g.parameter_bytes for g in rest)), _mb(sum(g.gradient_bytes for g in rest)),
            _mb(sum(g.moment_bytes for g in rest)), _mb(sum(g.replication_bytes for g in rest)),
        )  # fmt: skip
    sizes = [f"{a}={n}" for a, n in zip(report.mesh.axis_names, report.mesh.shape, strict=True) if n > 1]
    console.print(
        f"bytes a device on {report.mesh.size} devices ({' '.join(sizes) or 'one device'})", style="bold"
    )
    console.print(table)
    console.print(f"parameters   {report.parameter_bytes:>20,} bytes")
    console.print(f"gradients    {report.gradient_bytes:>20,} bytes")
    console.print(f"moments      {report.moment_bytes:>20,} bytes")
    console.print(f"counters     {report.count_bytes:>20,} bytes")
    console.print(f"train state  {report.state_bytes:>20,} bytes (parameters, moments, counters)")
    console.print(f"with grads   {report.total_bytes:>20,} bytes", style="bold")
    console.print(
        f"{report.partly_replicated_share:.2%} of the parameters' elements ({_mb(report.partly_replicated_bytes)} MB a "
        f"device) are cut into fewer pieces than there are devices; that costs {_mb(report.replication_bytes)} MB a "
        "device in parameters and moments"
    )
    if report.budget_bytes is not None:
        verdict = "within" if report.within_budget else "BEYOND"
        console.print(
            f"{verdict} the budget of {report.budget_bytes:,.0f} bytes a device",
            style="bold green" if report.within_budget else "bold red",
        )


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


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.3f}"
