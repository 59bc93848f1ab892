"""Pages of benchmarks: a collective over sizes with the fitted model beside it; kernels and moves beside a memcpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowshard.bench.bench_report import LEGEND, BenchReport
from lowshard.bench.figure import CollectiveReport
from lowshard.bench.plot import lines
from lowshard.bench.turn_timing import Row as KernelRow
from lowshard.report.page import (
    Bar,
    Bars,
    Card,
    Cell,
    Kind,
    Page,
    Picture,
    Pictures,
    Section,
    Table,
    number,
    shares,
)
from lowshard.report.svg import CurveLine, colour_of, draw_curves


def kernel_page(report: BenchReport) -> Page:
    """Return the page of `lowshard bench mxfp8` or `pack`."""
    rows = [row for section in report.sections for row in section.rows]
    misses = len(report.misses)
    cards = []
    if rows:
        best = min(rows, key=lambda row: row.ratio.median)
        worst = max(rows, key=lambda row: row.ratio.median)
        cards += [
            Card(f"{best.ratio.median:.2f} x memcpy", f"least: {best.name}"),
            Card(f"{worst.ratio.median:.2f} x memcpy", f"most: {worst.name}"),
        ]
    if report.limits:
        kept = report.limits - misses
        cards.append(Card(f"{kept} of {report.limits}", "limits kept", "bad" if misses else "good"))
    sections = [
        Section(
            section.title,
            LEGEND.format(rounds=report.rounds),
            (_ratios(section.rows), _kernels(section.rows)),
        )
        for section in report.sections
    ]
    return Page(
        f"lowshard bench {report.bench}",
        "Times as multiples of a copy with the same traffic, taken in the same run.",
        f"{misses} limits missed" if misses else "all limits kept" if report.limits else "done",
        not misses,
        tuple(cards),
        tuple(sections),
        report.facts,
    )


def _ratios(rows: Sequence[KernelRow]) -> Bars:
    ratios = [row.ratio.median for row in rows]
    limits = [row.ratio_limit or 0.0 for row in rows]
    scaled = shares([*ratios, *limits, 1.0])
    count = len(ratios)
    bars = []
    for i, row in enumerate(rows):
        limit = "" if row.ratio_limit is None else f", limit {row.ratio_limit:g}"
        mark = None if row.ratio_limit is None else scaled[count + i]
        kind: Kind = "bad" if row.ok is False else "plain"
        bars.append(Bar(row.name, scaled[i], f"{row.ratio.median:.2f} x memcpy{limit}", kind, mark))
    return Bars(tuple(bars), "Shorter is faster. The line is the limit.")


def _kernels(rows: Sequence[KernelRow]) -> Table:
    head = ("", "moved MB", "ms", "GB/s", "quartiles of x memcpy", "first call s")
    return Table(
        head,
        tuple(
            (
                Cell(row.name),
                number(f"{row.moved_bytes / 1e6:,.1f}"),
                number(f"{row.median_s * 1e3:,.3f}"),
                number(f"{row.gb_per_s:,.2f}"),
                number(f"{row.ratio.low:.2f} - {row.ratio.high:.2f}"),
                number(f"{row.first_call_s:.3f}"),
            )
            for row in rows
        ),
    )


def collective_page(report: CollectiveReport) -> Page:
    """Return the page of a sweep over a collective."""
    wrong = report.wrong
    cards = [Card(f"{wrong}", "wrong elements", "bad" if wrong else "good")]
    if any(row.size_bytes for row in report.rows):
        cards.append(Card(f"{report.average_busbw:.2f} GB/s", "average bus bandwidth"))
    quickest = min(figure.timing.median_s for row in report.rows for _, figure in row.figures)
    cards.append(Card(f"{quickest * 1e6:.1f} us", "shortest call"))
    busy = (
        " Other programs took part of the machine meanwhile: times are upper bounds."
        if report.is_busy
        else ""
    )
    sections = [*_curves(report), _sizes(report)]
    return Page(
        f"lowshard bench {report.settings.op}",
        f"{report.ranks} ranks over {report.transport}.{busy}",
        f"{wrong} elements are wrong" if wrong else "every result is right",
        not wrong,
        tuple(cards),
        tuple(sections),
        report.facts,
    )


def _curves(report: CollectiveReport) -> Iterator[Section]:
    drawn = list(lines(report))
    if not drawn or len(drawn[0][1]) < 2:
        return
    times = [
        CurveLine(name, tuple((size, us) for size, us in zip(sizes, took, strict=True)), i)
        for i, (name, sizes, took, _) in enumerate(drawn)
    ]
    legend = [(line.name, colour_of(line.colour)) for line in times]
    speeds = [
        CurveLine(name, tuple((s, b) for s, b in zip(sizes, busbw, strict=True) if b > 0), i)
        for i, (name, sizes, _, busbw) in enumerate(drawn)
    ]
    pictures = [Picture("Time of a call, us", draw_curves(times, "bytes", "us"))]
    if any(line.points for line in speeds):
        drawn_speeds = [line for line in speeds if line.points]
        pictures.append(Picture("Bus bandwidth, GB/s", draw_curves(drawn_speeds, "bytes", "GB/s")))
    yield Section(
        "Over sizes",
        "Both axes are logarithmic. A size is the bytes of the larger of a rank's two buffers.",
        (Pictures(tuple(pictures), tuple(legend)),),
    )


def _sizes(report: CollectiveReport) -> Section:
    rows = []
    for row in report.rows:
        for name, figure in row.figures:
            took = figure.timing.median_s
            rows.append((
                Cell(f"{row.size_bytes:,} B, {name}"),
                Cell(" ".join(filter(None, (row.dtype, row.redop)))),
                number(f"{took * 1e6:,.1f}"),
                number(f"{row.busbw(figure):.2f}"),
                number("" if figure.x_memcpy is None else f"{figure.x_memcpy:.2f}"),
                number("" if figure.x_mpi is None else f"{figure.x_mpi:.2f}"),
                number("" if figure.wrong is None else f"{figure.wrong}", "bad" if figure.wrong else "plain"),
            ))  # fmt: skip
    head = ("size", "type", "us", "busbw GB/s", "x memcpy", "x MPI", "wrong")
    return Section("Figures", "", (Table(head, tuple(rows)),))


def redistribute_page(report: Mapping[str, Any]) -> Page:
    """Return the page of `lowshard bench redistribute`, from its JSON."""
    wrong = sum(row["wrong"] for row in report["rows"])
    names = {"shared": "shared memory", "private": "ordinary memory"}
    sections = []
    for way, title in names.items():
        rows = [(row, row["ways"][way]["ratio"]) for row in report["rows"] if way in row["ways"]]
        limit_key = "limit" if way == "shared" else "private_limit"
        limits = [row[limit_key] or 0.0 for row, _ in rows]
        scaled = shares([ratio for _, ratio in rows] + limits)
        bars = tuple(
            Bar(
                f"{row['transition']}, {row['bytes'] >> 20} MB",
                scaled[i],
                f"{ratio:.2f} x least work, {row['ways'][way]['seconds'] * 1e3:.1f} ms",
                "bad" if row[limit_key] and ratio > row[limit_key] else "plain",
                scaled[len(rows) + i] if row[limit_key] else None,
            )
            for i, (row, ratio) in enumerate(rows)
        )
        lead = f"Sources in {title}: times over that of the least work a transition needs. The line is the limit."
        sections.append(Section(title.capitalize(), lead, (Bars(bars, "Shorter is faster."),)))
    plans = tuple(
        (
            Cell(f"{row['transition']}, {row['bytes'] >> 20} MB"),
            Cell("; ".join(row["steps"]) or "no step"),
            number(f"{max(row['sent_bytes']):,}"),
            number(f"{row['floor_s'] * 1e3:.1f}"),
            number(str(row["wrong"]), "bad" if row["wrong"] else "plain"),
        )
        for row in report["rows"]
    )
    head = ("transition", "plan", "most bytes a rank sends", "least work ms", "wrong")
    sections.append(Section("Plans", "What moves, and how.", (Table(head, plans),)))
    best = min((row["ways"]["shared"]["ratio"] for row in report["rows"]), default=0.0)
    return Page(
        "lowshard bench redistribute",
        f"{report['ranks']} ranks, medians of {report['rounds']} rounds.",
        f"{wrong} elements are wrong" if wrong else "every result is right",
        not wrong,
        (
            Card(f"{wrong}", "wrong elements", "bad" if wrong else "good"),
            Card(f"{best:.2f}", "x least work, at best"),
        ),
        tuple(sections),
        tuple((name, str(value)) for name, value in report["machine"].items()),
    )


def refit_page(rows: Sequence[Any], limit: float) -> Page:
    """Return the page of `lowshard bench refit`: rows as its table has them."""
    missed = [row for row in rows if row.limit is not None and row.ratio > row.limit]
    scaled = shares([*(row.ratio for row in rows), limit])
    bars = tuple(
        Bar(
            f"{row.name}, {row.memory}",
            scaled[i],
            f"{row.ratio:.2f} x memcpy, {row.median_s * 1e3:.1f} ms",
            "bad" if row in missed else "plain",
            scaled[-1] if row.limit is not None else None,
        )
        for i, row in enumerate(rows)
    )
    table = Table(
        ("case", "moved MB", "sent MB", "ready ms", "ms"),
        tuple(
            (
                Cell(f"{row.name}, {row.memory}"),
                number(f"{row.moved_bytes / 1e6:.0f}"),
                number(f"{row.sent_bytes / 1e6:.1f}"),
                number(f"{row.prepare_s * 1e3:.1f}"),
                number(f"{row.median_s * 1e3:.1f}"),
            )
            for row in rows
        ),
    )
    best = min((row.ratio for row in rows), default=0.0)
    return Page(
        "lowshard bench refit",
        "A model from training to serving layouts, beside a copy of as many bytes by as many processes.",
        f"{len(missed)} rows over the limit" if missed else "done",
        not missed,
        (Card(f"{best:.2f} x memcpy", "at best"), Card(str(len(rows)), "cases")),
        (Section("Times", "Shorter is faster. The line is the limit.", (Bars(bars), table)),),
        (),
    )


def model_page(rows: Sequence[Any]) -> Page:
    """Return the page of `lowshard bench refit --model`: its rows, the dense refit first."""
    scaled = shares([row.ratio for row in rows])
    bars = tuple(
        Bar(row.way, share, f"{row.ratio:.2f} x memcpy, {row.median_s * 1e3:.1f} ms", "plain", None)
        for row, share in zip(rows, scaled, strict=True)
    )
    table = Table(
        ("way", "changed %", "sent MB", "x least", "ms", "pause ms"),
        tuple(
            (
                Cell(row.way),
                number(f"{100 * row.changed:g}"),
                number(f"{row.sent_bytes / 1e6:,.2f}"),
                number(f"{row.sent_bytes / max(1, row.least_bytes):.2f}"),
                number(f"{row.median_s * 1e3:,.1f}"),
                number(f"{row.pause_s * 1e3:,.3f}"),
            )
            for row in rows
        ),
        "Least: elements that a rank needs and does not hold. Pause: how long a reader finds no whole version.",
    )
    dense = rows[0]
    return Page(
        "lowshard bench refit --model",
        "One model from ranks that train to ranks that serve, in several ways in turn.",
        "every way brought the sources' content",
        True,
        (
            Card(f"{dense.median_s * 1e3:.1f} ms", "a dense refit"),
            Card(f"{dense.pause_s * 1e3:.3f} ms", "readers pause"),
        ),
        (Section("Times", "Shorter is faster.", (Bars(bars), table)),),
        (),
    )
