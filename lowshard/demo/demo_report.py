"""What the demo found out, as the plain data that demo.json holds, and the table a person reads.

Of a report: `checkpoint`, `checkpoint_bytes`, `world_size`, `before` and `after` (the layouts in words), `ok`,
`environment`, and
- `rows`: `phase`, `moved_bytes_per_rank` (the most that any rank moved, or None), `seconds`, `check` (what was checked
  and how it came out), `ok`;
- `accuracy`: `label`, `kind` ("max_difference", to be at most `bound`, or "cosine", at least), `measured` (None: no
  number), `bound`, `ok`; and `accuracy_note`;
- `matrices`: `name`, `shape`, and the box of each rank `before` and `after`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowshard.plain_console import print_table

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "lowshard-demo-1"
Report = Mapping[str, Any]


def render_table(report: Report, console: Console) -> None:
    """Print the report: what ran where, a line a phase, the verdict."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ranks = report["world_size"]
    size = f"{report['checkpoint_bytes'] / 1e6:.1f} MB, {ranks} rank{'s' * (ranks != 1)}"
    console.print(Text.assemble("\n", ("lowshard demo", "bold"), f"  {report['checkpoint']}, {size}"))
    facts = {"training layout": report["before"], "serving layout": report["after"], **report["environment"]}
    for name, value in facts.items():
        console.print(Text(f"{name:<16} {value}", "dim"))
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    table.add_column("moved a rank", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("check", no_wrap=True)
    for row in report["rows"]:
        moved = row["moved_bytes_per_rank"]
        shown = "" if moved is None else f"{moved / 1e6:.1f} MB"
        table.add_row(Text(row["phase"]), shown, f"{row['seconds']:.3f}", _mark(row["ok"], row["check"]))
    print_table(console, table)
    console.print(Text(f"{report['accuracy_note']}\n", "dim"))
    verdict = "every check holds" if report["ok"] else "not every check holds: see above"
    console.print(_mark(report["ok"], verdict))


def _mark(ok: bool, text: str) -> Any:
    from rich.text import Text

    return Text.assemble(("ok", "green") if ok else ("FAILED", "bold red"), "  ", text)


def accuracy_text(figure: Report) -> str:
    """Return what was measured, and what it must be, in words."""
    measured, bound = figure["measured"], figure["bound"]
    if measured is None:
        return "no number"
    if figure["kind"] == "max_difference":
        return f"max difference {measured:.1e}, at most {bound:.0e}"
    return f"lowest cosine {measured:.5f}, at least {bound:g}"
