"""Functions that compiled code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowshard.compiled.deferred import Deferred, njit, types


def inner(function: Callable[..., Any]) -> Any:
    """Return a function for compiled code to call, compiled once whatever its arguments are.

    Numba by itself takes a constant in a call for a type of its own, and compiles the function anew for each.
    """

    def make() -> Any:
        made = njit(nogil=True)(function).real()
        template, free = made.get_call_template, types.unliteral

        def plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return template(tuple(map(free, args)), {k: free(v) for k, v in kwargs.items()})

        made.get_call_template = plain
        return made

    return Deferred(make, function)
