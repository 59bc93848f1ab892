"""The table of a collective's figures, in nccl-tests' form, line by line as they come, and its closing lines."""

from __future__ import annotations

from collections.abc import Iterator

from lowshard.bench.batch import CLEAN_SHARE
from lowshard.bench.figure import CollectiveReport, Figure, Row
from lowshard.bench.sweep_setting import AVERAGES, Settings

_EMPTY = "-"


class Listing:
    """Lines of a table."""

    def __init__(self, settings: Settings, ratios: tuple[str, ...]) -> None:
        self._settings = settings
        self._ratios = ratios

    def head(self, facts: tuple[tuple[str, str], ...], ranks: int) -> Iterator[str]:
        """Yield what ran where, and the columns."""
        settings = self._settings
        yield f"# lowshard bench {settings.op}: {ranks} rank{'s' * (ranks != 1)}"
        for name, value in facts:
            yield f"# {name:<10} {value}"
        how = [
            f"time of the {AVERAGES[settings.average]} rank"
            if settings.average != 1
            else "average over ranks"
        ]
        how.append(
            "each call timed by itself" if settings.each else f"{settings.rounds} rounds of batches of calls"
        )
        for said, words in (
            (settings.window, "buffers from comm.empty"),
            (settings.shared, "results shared by the node"),
            (settings.order != "fast", f"order {settings.order}"),
        ):
            if said:
                how.append(words)
        yield f"# {'how':<10} {', '.join(how)}"
        block = self._block_width
        fixed = f"{'':>52}"
        yield "#"
        yield f"#{fixed[1:]}{'out-of-place':^{block}}{'in-place':^{block}}".rstrip()
        names = f"{'time':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>7}" + "".join(
            f"{ratio:>9}" for ratio in self._ratios
        )
        yield f"#{'size':>11}{'count':>13}{'type':>10}{'redop':>8}{'root':>6}   {names}{names}"
        units = f"{'(us)':>10}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}" + " " * (9 * len(self._ratios))
        yield f"#{'(B)':>11}{'(elements)':>13}{'':>10}{'':>8}{'':>6}   {units}{units}".rstrip()

    def row(self, row: Row) -> Iterator[str]:
        """Yield a size's line; with `-I` one more for each placement, on how its calls spread."""
        root = -1 if row.root is None else row.root
        start = f"{row.size_bytes:>12}{row.count:>13}{row.dtype:>10}{row.redop or 'none':>8}{root:>6}   "
        yield (start + self._block(row, row.out) + self._block(row, row.inside)).rstrip()
        if self._settings.each:
            for name, figure in row.figures:
                timing = figure.timing
                times = (timing.least_s, timing.median_s, timing.p99_s, timing.most_s)
                texts = [_time(seconds).strip() for seconds in times]
                yield (
                    f"#{'':>14}{name}: min {texts[0]}, median {texts[1]}, p99 {texts[2]}, max {texts[3]} us, "
                    f"cv {100 * timing.cv:.1f}% over {len(timing.counted)} calls"
                )

    def _block(self, row: Row, figure: Figure | None) -> str:
        if figure is None:
            return f"{_EMPTY:>10}{_EMPTY:>8}{_EMPTY:>8}{_EMPTY:>7}" + f"{_EMPTY:>9}" * len(self._ratios)
        # A tilde: no round was clean, the time is an upper bound.
        time = ("~" if figure.timing.is_bound else "") + _time(figure.timing.median_s).strip()
        speeds = (
            f"{row.algbw(figure):>8.2f}{row.busbw(figure):>8.2f}" if row.size_bytes else f"{_EMPTY:>8}" * 2
        )
        wrong = _EMPTY if figure.wrong is None else str(figure.wrong)
        values = {"x memcpy": figure.x_memcpy, "x mpi": figure.x_mpi}
        ratios = "".join(f"{_ratio(values[name]):>9}" for name in self._ratios)
        return f"{time:>10}{speeds}{wrong:>7}{ratios}"

    @property
    def _block_width(self) -> int:
        return 33 + 9 * len(self._ratios)

    def close(self, report: CollectiveReport) -> Iterator[str]:
        """Yield the closing lines: wrong values, average bus bandwidth, whether the machine was busy."""
        yield f"# Out of bounds values : {report.wrong} {'FAILED' if report.wrong else 'OK'}"
        if self._settings.op != "barrier":
            yield f"# Avg bus bandwidth    : {report.average_busbw:.4g} GB/s"
        if self._ratios:
            yield from self._legend()
        if report.is_busy:
            share = min(100, round(100 * (report.share or 0.0)))
            yield (
                f"# machine busy: the ranks got {share}% of the CPU time that they can fill, in the median over "
                f"all rounds; {CLEAN_SHARE:.0%} makes a round clean"
            )
        if report.bounds:
            yield f"# ~ {report.bounds} times are upper bounds: no round of theirs was clean"

    def _legend(self) -> Iterator[str]:
        if "x memcpy" in self._ratios:
            yield "# x memcpy: time over that in which all ranks at once copy as many bytes, taking turns with it"
        if "x mpi" in self._ratios:
            yield "# x mpi: time over that of mpi4py's own call on NumPy buffers, taking turns with it"


def ratios_of(settings: Settings, on_host: bool) -> tuple[str, ...]:
    """Return the ratios that a sweep's table shows."""
    if not on_host:
        return ()
    found = [] if settings.op == "barrier" else ["x memcpy"]
    return (*found, "x mpi") if settings.compare_mpi else tuple(found)


def _time(seconds: float) -> str:
    """Return microseconds with three digits or more, as nccl-tests writes them."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 1000 else f"{us:.1f}" if us < 100_000 else f"{us:.0f}"


def _ratio(value: float | None) -> str:
    return _EMPTY if value is None else f"{value:.2f}"
