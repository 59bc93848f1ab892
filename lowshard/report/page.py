"""A page of parts, written as one HTML file: no network, no script, light and dark, narrow and wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowshard.errors import DependencyError
from lowshard.flag_value import write_whole

PAGE_NAME = "index.html"
Kind = Literal["plain", "good", "bad"]


@dataclass(frozen=True)
class Card:
    """One large figure."""

    value: str
    name: str
    kind: Kind = "plain"


@dataclass(frozen=True)
class Bar:
    """One bar: a name, its length as a share of the longest, and what stands behind it."""

    name: str
    share: float
    text: str
    kind: Kind = "plain"
    mark: float | None = None
    """Where a line crosses it, as a share: what it is compared with."""


@dataclass(frozen=True)
class Bars:
    """Bars below each other."""

    bars: tuple[Bar, ...]
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    kind: Kind = "plain"
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below a head; on a narrow screen a block for each row."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG drawing with its title; the text in it is escaped already."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Pictures:
    """Drawings beside each other where there is room."""

    pictures: tuple[Picture, ...]
    legend: tuple[tuple[str, str], ...] = ()
    """Names, each with the class of its colour."""


@dataclass(frozen=True)
class Text:
    """Words as a program printed them."""

    text: str
    title: str = ""


Part = Bars | Table | Pictures | Text


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, and what it is about."""

    title: str
    lead: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Page:
    """Everything on a page."""

    title: str
    lead: str
    verdict: str
    is_good: bool
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]
    """What ran where: names and values."""


def number(text: str, kind: Kind = "plain") -> Cell:
    """Return a cell with a number in it."""
    return Cell(text, kind, is_number=True)


def require_report() -> None:
    """Check that a page can be made, before the work it is to show.

    Raises:
        DependencyError: jinja2 is missing.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise DependencyError("--report needs jinja2: pip install 'lowshard[plot]'") from error


def render(page: Page) -> str:
    """Return a page as HTML.

    Raises:
        DependencyError: jinja2 is missing.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lowshard.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["kind_of"] = lambda part: type(part).__name__
    return environment.get_template("page.html").render(page=page)


def write_page(page: Page, folder: Path) -> Path:
    """Write a page into a folder, whole or not at all, and return its path."""
    path = folder / PAGE_NAME
    write_whole(path, render(page).encode())
    return path


def shares(values: Sequence[float]) -> list[float]:
    """Return each value as a share of the largest; 0 where all are 0."""
    most = max(values, default=0.0)
    return [value / most if most > 0 else 0.0 for value in values]
