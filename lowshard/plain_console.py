"""The console that commands print tables and lines on: what they print stands as it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["make_console", "print_table"]


def make_console(stderr: bool = False, piped_width: int = 200) -> Console:
    """Return a console; into a pipe it writes lines of up to so many characters, without colours.

    It prints brackets and colons as they stand: names of tensors and paths of files may have them.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else piped_width
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: on a narrow terminal its lines go on in the next one, where rich would cut the figures."""
    whole = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, whole)
    console.print(table)
