"""Pages of benchmarks whose figures stand as bars beside their limits: fsdp, plan, pick, host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowshard.bench.machine import cpu_model
from lowshard.report.page import Bar, Bars, Card, Page, Section, Table, shares


@dataclass(frozen=True)
class Figure:
    """One bar: what was measured, and what it may be at most."""

    name: str
    value: float
    text: str
    limit: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is above its limit."""
        return self.limit is not None and self.value > self.limit


@dataclass(frozen=True)
class FigureGroup:
    """Bars on one scale, and a table of what else is known of the same rows."""

    title: str
    figures: tuple[Figure, ...]
    table: Table | None = None


def figure_page(bench: str, lead: str, groups: Sequence[FigureGroup], wrong: str = "") -> Page:
    """Return the page of a benchmark.

    Args:
        bench: its name.
        lead: what was measured, a sentence.
        groups: one section each, one or more.
        wrong: what is wrong beside the figures, or "".
    """
    figures = [figure for group in groups for figure in group.figures]
    limits = sum(figure.limit is not None for figure in figures)
    over = sum(figure.is_over for figure in figures)
    cards = []
    if groups[0].figures:
        most = max(groups[0].figures, key=lambda figure: figure.value)
        cards.append(Card(most.text, f"most: {most.name}"))
    if limits:
        cards.append(Card(f"{limits - over} of {limits}", "limits kept", "bad" if over else "good"))
    done = "all limits kept" if limits else "done"
    return Page(
        f"lowshard bench {bench}",
        lead,
        wrong or (f"{over} figures over their limit" if over else done),
        not (over or wrong),
        tuple(cards),
        tuple(_section(group) for group in groups),
        (("cpu", cpu_model()),),
    )


def _section(group: FigureGroup) -> Section:
    has_limit = any(figure.limit is not None for figure in group.figures)
    lead = "Shorter is better. The line is the limit." if has_limit else "Shorter is better."
    bars = Bars(_bars(group.figures))
    return Section(group.title, lead, (bars,) if group.table is None else (bars, group.table))


def _bars(figures: Sequence[Figure]) -> tuple[Bar, ...]:
    limits = [figure.limit or 0.0 for figure in figures]
    scaled = shares([*(figure.value for figure in figures), *limits])
    return tuple(
        Bar(
            figure.name,
            scaled[i],
            figure.text,
            "bad" if figure.is_over else "plain",
            None if figure.limit is None else scaled[len(figures) + i],
        )
        for i, figure in enumerate(figures)
    )
