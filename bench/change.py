"""`--compare`: how the figures of a run differ from those of an earlier one, size by size."""

from __future__ import annotations

from collections.abc import Iterator

from lowshard.bench.figure import CollectiveReport, Figure, Row
from lowshard.bench.sweep_setting import Settings
from lowshard.errors import LowshardError

# Facts of the machine that are worth a line where they differ: the figures may differ because of them.
_TOLD = ("lowshard", "transport", "mpi", "hosts", "cpu", "gpu", "nccl", "check", "path")


def require_comparable(settings: Settings, ranks: int | None, old: CollectiveReport, name: str) -> None:
    """Raise unless an earlier run did the same thing.

    Args:
        settings: what is to be done now.
        ranks: number of ranks now; None where it is not known yet.
        old: the earlier run.
        name: its file, for the message.

    Raises:
        LowshardError: settings or ranks differ; the text lists them all.
    """
    differ = list(settings.differences(old.settings))
    if ranks is not None and ranks != old.ranks:
        differ.append(f"--ranks: {ranks} here, {old.ranks} there")
    if differ:
        raise LowshardError(
            f"--compare takes a run with the same settings, but {name} differs in {'; '.join(differ)}"
        )


def changes(new: CollectiveReport, old: CollectiveReport) -> Iterator[str]:
    """Yield lines that compare two runs: times, their change, and the change of the ratio to a memcpy."""
    was, now = dict(old.facts), dict(new.facts)
    for fact in _TOLD:
        if was.get(fact) != now.get(fact):
            yield f"# {fact}: {was.get(fact, '-')} before, {now.get(fact, '-')} now"
    yield (
        f"#{'size':>11}{'type':>10}{'redop':>8}  {'placement':<13}{'old us':>10}{'new us':>10}{'change':>9}"
        f"{'old x memcpy':>14}{'new':>7}"
    )
    before = {row.key: row for row in old.rows}
    for row in new.rows:
        match = before.get(row.key)
        if match is None:
            yield f"{row.size_bytes:>12}{row.dtype:>10}{row.redop or 'none':>8}  not in the earlier run"
            continue
        yield from _row_changes(row, match)
    if any(figure.timing.is_bound for row in (*new.rows, *old.rows) for _, figure in row.figures):
        yield "# ~: one of the two times, or both, is an upper bound"
    here = {row.key for row in new.rows}
    gone = [str(row.size_bytes) for row in old.rows if row.key not in here]
    if gone:
        yield f"# only in the earlier run: {', '.join(dict.fromkeys(gone))} bytes"


def _row_changes(row: Row, match: Row) -> Iterator[str]:
    earlier = dict(match.figures)
    for placement, figure in row.figures:
        old = earlier.get(placement)
        if old is None:
            continue
        start = f"{row.size_bytes:>12}{row.dtype:>10}{row.redop or 'none':>8}  {placement:<13}"
        change = figure.timing.median_s / old.timing.median_s - 1.0
        bound = "~" if figure.timing.is_bound or old.timing.is_bound else ""
        yield (
            f"{start}{_us(old):>10}{_us(figure):>10}{bound + f'{100 * change:+.1f}%':>9}"
            f"{_x(old):>14}{_x(figure):>7}"
        )


def _us(figure: Figure) -> str:
    return f"{figure.timing.median_s * 1e6:.2f}"


def _x(figure: Figure) -> str:
    return "-" if figure.x_memcpy is None else f"{figure.x_memcpy:.2f}"
