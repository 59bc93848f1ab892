"""Numba's decorators and modules, imported when something is compiled: who finds its code on disk needs none of it.

Compiled, called, or asked for an attribute, what stands here is the real object: Numba asks a value that it does not
know for its type by the attribute `_numba_type_`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, ClassVar

_lock = threading.RLock()


class Deferred:
    """Stands for an object that is made when it is needed first, or when `take_up` is called."""

    _waiting: ClassVar[list[Deferred]] = []

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        if function is not None:  # that the object is made of: kept as `py_func`, as Numba has it
            update_wrapper(self, function)
            self.py_func = function
        self._make: Callable[[], Any] | None = make
        self._real: Any = None
        Deferred._waiting.append(self)

    def real(self) -> Any:
        """Return the object."""
        if self._make is not None:
            with _lock:
                if self._make is not None:  # no other thread was first
                    self._real, self._make = self._make(), None
        return self._real

    @property
    def _numba_type_(self) -> Any:
        from numba.core.registry import cpu_target

        return cpu_target.typing_context.resolve_value_type(self.real())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        take_up()  # before it is compiled
        return self.real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and printing ask for
            raise AttributeError(name)
        return getattr(self.real(), name)


def take_up() -> None:
    """Make everything that waits: Numba reads its registers of functions when it begins to compile, and not amid it."""
    while Deferred._waiting:
        Deferred._waiting.pop().real()


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


types = Deferred(lambda: importlib.import_module("numba.types"))
carray = Deferred(lambda: _attribute("numba", "carray"))
cgutils = Deferred(lambda: importlib.import_module("numba.core.cgutils"))


def njit(**options: Any) -> Callable[..., Any]:
    """As `numba.njit`."""
    return lambda function: Deferred(lambda: _attribute("numba", "njit")(**options)(function), function)


def overload(target: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As `numba.extending.overload`."""
    return lambda function: Deferred(
        lambda: _attribute("numba.extending", "overload")(target, **options)(function), function
    )


def intrinsic(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """As `numba.extending.intrinsic`, with options or without."""
    if function is None:
        return lambda decorated: intrinsic(decorated, **options)

    def make() -> Any:
        real = _attribute("numba.extending", "intrinsic")
        return real(**options)(function) if options else real(function)

    return Deferred(make, function)
