"""Arguments of ops that are no tensors: numbers, texts and sequences of numbers, as Python's own values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import MOST_ELEMS, brief, instance, items, whole
from lowshard.errors import DTypeError, LayoutError

MOST_ENTRIES = 10_000
"""In an argument that is a sequence; of the results of one op."""
_REALS = frozenset(("eps", "scale", "value"))
"""The arguments that may be floats; but for these, dtypes and texts all are integers, True or False, or sequences."""
_TEXTS = frozenset(("layout", "mode", "subscripts"))
_MOST_DEPTH = 3


@dataclass(frozen=True)
class PerShard:
    """An argument of an op that has a value of its own on each rank: one of `extras`, or put in by `finalize`.

    The results must be what the row says they are; that is the rule's part, so `pick` takes none.

    Args:
        values: one a rank of the mesh, in row-major order. All ranks name all of them.
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        values = items(self.values, "PerShard has a sequence of values, one a rank", LayoutError)
        object.__setattr__(self, "values", _freeze(values))


def plain_args(op: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op by name, each checked and plain."""
    return {name: plain_argument(f"{op}: argument {name!r}", name, value) for name, value in args.items()}


def plain_argument(what: str, name: str, value: object) -> Any:
    """Return an argument as a dtype's name, a text, a number, True, False, None, or tuples of those."""
    if name == "dtype":
        row = dtypes.get(value)
        if row.kind == "opaque":
            raise DTypeError(f"{what} is a dtype that lowshard computes with, got {row}")
        return row.name
    if name in _TEXTS:
        return instance(value, str, f"{what} is text", LayoutError)
    return _number(value, what, name in _REALS, _MOST_DEPTH)


def few(values: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return the entries of an argument, or raise LayoutError where there are too many."""
    if len(values) > MOST_ENTRIES:
        raise LayoutError(f"{what} has at most {MOST_ENTRIES:,} entries, got {len(values):,}")
    return values


def freeze_args(args: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return arguments as a hashable value: sorted by name, lists as tuples, NumPy's scalars as Python's."""
    if not args:
        return ()
    return tuple((name, _freeze(args[name])) for name in sorted(args))


def told_apart(value: Any) -> Any:
    """Return arguments such that equal ones have equal digests: 1, 1.0 and True are told apart, and 0.0 from -0.0."""
    if type(value) is tuple:
        return tuple(map(told_apart, value))
    if type(value) in (int, str):
        return value
    if isinstance(value, PerShard):
        return PerShard, told_apart(value.values)
    return type(value), repr(value) if type(value) is float else value


def _as_float(value: Any) -> float:
    """Return a float; of NaN, which is not equal to itself, always the same object: tuples of it are equal then."""
    number = float(value)
    return number if number == number else math.nan


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def _number(value: Any, what: str, is_real: bool, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "__index__") and not getattr(value, "ndim", 0):
        most = (1 << 63) - 1 if is_real else MOST_ELEMS  # what JSON files hold
        return whole(value, f"{what} is a number from {-most} to {most}", LayoutError, -most, most)
    if is_real and isinstance(value, numbers.Real):
        return _as_float(value)
    if depth and (isinstance(value, (list, tuple)) or getattr(value, "ndim", 0)):
        entries = few(items(value, what, LayoutError), what)
        return tuple(_number(entry, what, is_real, depth - 1) for entry in entries)
    kinds = "a number" if is_real else "an integer"
    raise LayoutError(f"{what} is {kinds}, True or False, or a sequence of them; got {brief(value)}")
