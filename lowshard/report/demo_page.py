"""The page of a demo's report: speed, who holds what, the plan with its prediction, accuracy."""

from __future__ import annotations

from collections.abc import Iterator

from lowshard.demo.demo_report import Accuracy, DemoReport, PhaseRow, PlanView, megabytes, speed_text
from lowshard.report.page import (
    Bar,
    Bars,
    Card,
    Cell,
    Page,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
    number,
    shares,
)
from lowshard.report.svg import colour_of, draw_matrix

_MOST_RANKS_TOLD = 16


def demo_page(report: DemoReport) -> Page:
    """Return the page of a demo's report."""
    ranks = f"{report.world_size} rank{'s' * (report.world_size != 1)}"
    return Page(
        title=f"lowshard demo: {report.checkpoint}",
        lead=f"{megabytes(report.checkpoint_bytes)} on {ranks}. Training layout: {report.before}. "
        f"Serving layout: {report.after}.",
        verdict="every check holds" if report.ok else "a check failed",
        is_good=report.ok,
        cards=tuple(_cards(report)),
        sections=tuple(_sections(report)),
        facts=report.environment,
    )


def _cards(report: DemoReport) -> Iterator[Card]:
    fastest = min(
        (r for r in report.rows if r.memcpy_ratio), key=lambda r: r.memcpy_ratio or 0.0, default=None
    )
    if report.memcpy_gb_per_s is not None:
        yield Card(f"{report.memcpy_gb_per_s:.2f} GB/s", "memcpy a rank, all ranks at once")
    for row in report.rows:
        if row.phase == "move to the serving layout" and row.memcpy_ratio is not None:
            yield Card(f"{row.memcpy_ratio:.1f} x memcpy", "move to the serving layout")
    refits = [r for r in report.rows if r.phase.startswith("refit") and r.memcpy_ratio is not None]
    if refits:
        yield Card(f"{min(r.memcpy_ratio or 0.0 for r in refits):.1f} x memcpy", "fastest refit to MXFP8")
    elif fastest is not None:
        yield Card(f"{fastest.memcpy_ratio:.1f} x memcpy", fastest.phase)
    good = sum(row.ok for row in report.rows) + sum(figure.ok for figure in report.accuracy)
    every = len(report.rows) + len(report.accuracy)
    yield Card(f"{good} of {every}", "checks hold", "good" if good == every else "bad")


def _sections(report: DemoReport) -> Iterator[Section]:
    yield Section(
        "Speed",
        "What each phase moved a rank, as bytes over seconds, beside a copy of as many bytes in the same run. "
        "Code is loaded, or compiled the first time, in the phases that make ready, and counts in no bar.",
        (_speed(report), _phases(report.rows)),
    )
    if report.matrices:
        yield Section(
            "Who holds what",
            "Two matrices before and after the move. Stripes: several ranks hold a copy.",
            (_matrices(report),),
        )
    if report.plan is not None:
        yield _plan(report.plan)
    if report.accuracy:
        yield Section(
            "Accuracy",
            "Embeddings of the sharded encoder beside those of the unsharded one in fp32. "
            f"{report.accuracy_note or ''}",
            (Table(("weights", "measured", "must be", "check"), tuple(map(_accuracy, report.accuracy))),),
        )
    elif report.accuracy_note:
        yield Section("Accuracy", report.accuracy_note, ())


def _speed(report: DemoReport) -> Bars:
    rows = [(row, row.gb_per_s) for row in report.rows if row.gb_per_s is not None]
    memcpy = report.memcpy_gb_per_s
    scaled = shares([speed for _, speed in rows] + ([] if memcpy is None else [memcpy]))
    mark = None if memcpy is None else scaled[-1]
    bars = tuple(
        Bar(
            row.phase,
            share,
            f"{speed_text(speed)} GB/s"
            + ("" if row.memcpy_ratio is None else f", {row.memcpy_ratio:.1f} x memcpy's time"),
            "plain" if row.ok else "bad",
            mark,
        )
        for (row, speed), share in zip(rows, scaled, strict=False)
    )
    return Bars(bars, "" if memcpy is None else f"The line is memcpy: {memcpy:.2f} GB/s. GB = 10^9 bytes.")


def _phases(rows: tuple[PhaseRow, ...]) -> Table:
    return Table(
        ("phase", "seconds", "moved a rank", "check"),
        tuple(
            (
                Cell(row.phase),
                number(f"{row.seconds:.3f}"),
                number("" if row.moved_bytes_per_rank is None else megabytes(row.moved_bytes_per_rank)),
                Cell(("ok: " if row.ok else "FAILED: ") + row.check, "plain" if row.ok else "bad"),
            )
            for row in rows
        ),
    )


def _matrices(report: DemoReport) -> Pictures:
    pictures = []
    for view in report.matrices:
        for boxes, when in ((view.before, "training"), (view.after, "serving")):
            name = f"{view.name}, {when} layout"
            svg = draw_matrix(view.shape, boxes, name)
            note = f"{view.shape[0]} x {view.shape[1]}"
            if view.head_dim is not None:
                note += f", {view.num_heads} heads along {'rows' if view.head_dim == 0 else 'columns'}"
            pictures.append(Picture(name, svg, note))
    legend = tuple((f"rank {rank}", colour_of(rank)) for rank in range(min(report.world_size, 8)))
    return Pictures(tuple(pictures), legend)


def _plan(plan: PlanView) -> Section:
    told = list(zip(plan.planned_bytes, plan.moved_bytes, strict=True))
    rows = tuple(
        (
            Cell(f"rank {rank}"),
            number(f"{planned:,}"),
            number(f"{moved:,}"),
            Cell("ok" if planned == moved else "differs", "good" if planned == moved else "bad"),
        )
        for rank, (planned, moved) in enumerate(told[:_MOST_RANKS_TOLD])
    )
    most = max(plan.predicted_s, plan.measured_s)
    scaled = [plan.predicted_s / most, plan.measured_s / most] if most > 0 else [0.0, 0.0]
    times = Bars(
        (
            Bar("predicted", scaled[0], f"{plan.predicted_s * 1e3:.1f} ms"),
            Bar("measured", scaled[1], f"{plan.measured_s * 1e3:.1f} ms"),
        ),
        "Predicted by the built-in cost profile, tensor after tensor: it has orders of magnitude, and knows nothing of "
        "this machine. ",
    )
    more = len(told) - len(rows)
    table = Table(
        ("", "bytes planned", "bytes received", "check"), rows, f"and {more} more ranks" if more > 0 else ""
    )
    return Section(
        "Plan of the move",
        "Every rank works the plan out for itself; plans are compared before a byte moves.",
        (times, table, Text(plan.explanation, f"One tensor's plan: {plan.example}")),
    )


def _accuracy(figure: Accuracy) -> tuple[Cell, ...]:
    check = Cell("ok" if figure.ok else "FAILED", "good" if figure.ok else "bad")
    return Cell(figure.label), *map(Cell, figure.told), check
