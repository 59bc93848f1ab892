"""Checks of what a caller passes: each returns the argument as the value that is meant, or raises the error given."""

from __future__ import annotations

import numbers
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from math import inf, nan, prod, ulp
from pathlib import Path
from typing import Any, TypeVar

from lowshard.errors import LowshardError
from lowshard.nearest import nearest

T = TypeVar("T")

MOST_ELEMS = (1 << 63) // 16 - 1
"""Of an array: the bytes of any dtype are then an int64."""
MOST_FLOAT = sys.float_info.max
MOST_DIMS = 64
"""Of an array: NumPy's limit."""


def whole(
    value: object, rule: str, error: type[LowshardError], least: int | None = None, most: int | None = None
) -> int:
    """Return an integer (Python's, NumPy's or any with `__index__`; True and 1.0 are none), or raise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # else it raises
    except (TypeError, ValueError):  # ValueError: an array of several
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise error(f"{rule}, got {brief(value)}")
    return number


def wholes(
    values: object, rule: str, error: type[LowshardError], least: int | None = None, most: int | None = None
) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple, each checked as `whole` does, or raise."""
    found = tuple(items(values, rule, error))
    low, high = (-inf if least is None else least), (inf if most is None else most)
    if all(type(v) is int and low <= v <= high for v in found):  # of thousands of layouts: no text is made
        return found
    told = f"{rule}: {brief(values)}"
    return tuple(whole(v, told, error, least, most) for v in found)


def as_shape(shape: object, rule: str, error: type[LowshardError]) -> tuple[int, ...]:
    """Return the shape of an array, or of one that only parts are ever made of, as a tuple of integers, or raise."""
    found = wholes(shape, rule, error, 0, MOST_ELEMS)
    # An empty array is one that NumPy makes: it multiplies the other extents.
    if len(found) > MOST_DIMS or (0 in found and prod(filter(None, found)) > MOST_ELEMS):
        raise error(f"{rule}, of an array that can be made: at most {MOST_DIMS} dims; got {brief(shape)}")
    return found


def real(value: object, rule: str, error: type[LowshardError]) -> float:
    """Return a finite number above 0 (an integer, or a float of Python's or NumPy's) as a float, or raise."""
    return number(value, rule, error, least=ulp(0.0))


def number(
    value: object,
    rule: str,
    error: type[LowshardError],
    least: float = -MOST_FLOAT,
    below: float | None = None,
) -> float:
    """Return a finite number (an integer, or a float of Python's or NumPy's) as a float, or raise."""
    # Floats first: to ask whether another type is a number takes longer than the rest.
    is_number = type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    try:
        found = float(value) if is_number else nan  # type: ignore[arg-type]
    except OverflowError:  # an integer past the largest float
        found = nan
    if not least <= found <= MOST_FLOAT or (below is not None and not found < below):
        raise error(f"{rule}, got {brief(value)}")
    return found


def items(
    values: object, rule: str, error: type[LowshardError], *, any_order: bool = False
) -> tuple[Any, ...]:
    """Return what an iterable holds as a tuple, or raise; a text is not an iterable, and neither is a mapping."""
    none = (str, bytes, Mapping) if any_order else (str, bytes, Mapping, set, frozenset)
    if isinstance(values, none) or not isinstance(values, Iterable):
        raise error(f"{rule}, got {brief(values)}")
    try:
        return tuple(values)
    except TypeError:  # an array of no dims says that it is iterable
        raise error(f"{rule}, got {brief(values)}") from None


def choice(value: object, names: Collection[str], rule: str, error: type[LowshardError]) -> None:
    """Raise unless a value is one of some names."""
    if not isinstance(value, str) or value not in names:
        raise error(f"{rule}, got {brief(value)}{nearest(value, names)}")


def one_of(value: object, names: Collection[str], what: str, error: type[LowshardError]) -> None:
    """Raise unless a value is one of some names, all of which the error says."""
    choice(value, names, f"{what} is one of {', '.join(names)}", error)


def truth(value: object, rule: str, error: type[LowshardError]) -> bool:
    """Return a flag: True, False, 1, 0, or an array's one element; or raise. A text such as "no" is none of them."""
    if isinstance(value, bool):
        return value
    try:
        if hasattr(value, "dtype") or (isinstance(value, int) and value in (0, 1)):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several; the last one is torch's
        pass
    raise error(f"{rule}, got {brief(value)}")


def path(value: object, rule: str, error: Callable[[str], LowshardError]) -> Path:
    """Return a path given as text or as one, or raise; `~` is refused, since what is made there lies elsewhere."""
    given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise error(f"{rule}, got {brief(value)}")
    if Path(given).parts[:1] == ("~",):
        raise error(f"{rule}, got {brief(given)}; a shell expands ~, a program by os.path.expanduser(path)")
    return Path(given)


def mapping(value: object, rule: str, error: type[LowshardError]) -> Mapping[Any, Any]:
    """Return a mapping, or raise."""
    if not isinstance(value, Mapping):
        raise error(f"{rule}, got {brief(value)}")
    return value


def instance(value: object, kind: type[T], rule: str, error: type[LowshardError]) -> T:
    """Return a value of a type, or raise."""
    if not isinstance(value, kind):
        raise error(f"{rule}, got {brief(value)}")
    return value


def is_text(value: str) -> bool:
    """Return False for half surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def quoted(value: object) -> str:
    """Return the repr of plain data, as files hold it, cut where it is long; `brief` is for what a caller passes."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def brief(value: object) -> str:
    """Return a value as text that fits into a message, whatever it is."""
    if not isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return _brief_item(value)
    more = f", ... {len(value)} items" if len(value) > 8 else ""
    if isinstance(value, Mapping):
        pairs = [f"{_brief_item(k)}: {_brief_item(v)}" for k, v in islice(value.items(), 8)]
        return f"{{{', '.join(pairs)}{more}}}"
    return f"[{', '.join(map(_brief_item, islice(value, 8)))}{more}]"


def kind_of(value: object) -> str:
    """Return the name of a value's class, with its module where that is not Python's own: float32 is many things."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def in_words(values: Mapping[str, object], most: int = 3) -> str:
    """Return values by name as text for a message: the first few, and how many more there are."""
    shown = ", ".join(f"{brief(name)}: {value}" for name, value in islice(values.items(), most))
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown


def one_line(text: str) -> str:
    """Return a text, which may come from a file of another, without characters that a terminal acts on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Return a text as `one_line` does, with its line breaks."""
    return "\n".join(map(one_line, text.split("\n")))


def _brief_item(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write very long ones
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (str, bytes)) and len(value) > 120:
        return f"{value[:100]!r}... ({len(value)} characters)"
    try:
        text = repr(value)
    except Exception:  # the message is about the argument, not about its repr
        text = f"a {type(value).__name__}"
    if "\n" in text:  # a message is one line: an array is told by its shape
        kind = type(value).__name__
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        text = f"{kind} {dtype}{list(shape)}" if isinstance(shape, tuple) else " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:140]}..."
