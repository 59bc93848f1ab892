"""The console that commands print tables and lines on: what they print stands as it is."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["add_json_argument", "busy", "make_console", "print_table", "put_json", "transfer"]

_QUIET_S = 2.0


def make_console(stderr: bool = False, piped_width: int = 200) -> Console:
    """Return a console; into a pipe it writes lines of up to so many characters, without colours."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else piped_width
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: on a narrow terminal its lines go on in the next one, where rich would cut the figures."""
    whole = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, whole)
    console.print(table)


@contextmanager
def busy(command: str, doing: str) -> Iterator[None]:
    """Show on stderr that something runs: moving on a terminal, elsewhere a line once it has taken two seconds."""
    if sys.stderr.isatty():
        from rich.text import Text

        with make_console(stderr=True).status(Text(doing)):
            yield
        return
    line = threading.Timer(
        _QUIET_S, lambda: print(f"lowshard {command}: {doing}", file=sys.stderr, flush=True)
    )
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


@contextmanager
def transfer(command: str, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr how much is done: a bar on a terminal, elsewhere as `busy`. Gives what takes the bytes so far."""
    if not sys.stderr.isatty():
        with busy(command, label):
            yield lambda done_bytes: None
        return
    from rich import progress

    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TimeRemainingColumn())
    text = progress.TextColumn("{task.description}", markup=False)
    with progress.Progress(text, *columns, console=make_console(stderr=True)) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=min(done_bytes, total_bytes))


def add_json_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--json`, which means the same in every command."""
    parser.add_argument(
        "--json", nargs="?", const="-", type=_json_target, metavar="FILE.json",
        help="write JSON to a file beside the table; -, or no file: print it, and no table",
    )  # fmt: skip


def put_json(target: str | None, text: Callable[[], str]) -> bool:
    """Print or write JSON as `--json` asks; return whether it stands in the table's place."""
    if target == "-":
        print(text())
    elif target is not None:
        Path(target).write_text(f"{text()}\n", encoding="utf-8")
    return target == "-"


def _json_target(text: str) -> str:
    """Return a path in a folder that is there, or -."""
    if text != "-" and (not text.endswith(".json") or not Path(text).absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"expected - or FILE.json in a folder that is there, got {text!r}")
    return text
