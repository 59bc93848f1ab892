"""Numba's decorators and modules, imported when something is compiled: who finds its code on disk needs none of it.

What stands here behaves in compiled code as Numba's own does: Numba asks a value that it does not know for its type by
the attribute `_numba_type_`, and gets that of the real object. Called or asked for an attribute from Python it is the
real object too.
"""

from __future__ import annotations

import importlib
import threading
import typing
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, ClassVar

_lock = threading.RLock()


class Deferred:
    """Stands for an object that is made when it is needed first, or when `take_up` is called."""

    _waiting: ClassVar[list[Deferred]] = []

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        """Remember how to make the object, and of which Python function it is made.

        Args:
            make: returns the object.
            function: kept as `py_func`, as Numba has it.
        """
        if function is not None:
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


def module(name: str) -> Any:
    """Return a module that is imported on first use."""
    return Deferred(lambda: importlib.import_module(name))


def _numba(name: str) -> Any:
    return Deferred(lambda: getattr(importlib.import_module("numba"), name))


types = module("numba.types")
carray = _numba("carray")
cgutils = module("numba.core.cgutils")


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit`."""

    def decorate(function: Callable[..., Any]) -> Any:
        def make() -> Any:
            import numba

            return numba.njit(**options)(function)

        return Deferred(make, function)

    return decorate


@typing.overload
def intrinsic(function: Callable[..., Any]) -> Any: ...


@typing.overload
def intrinsic(**options: Any) -> Callable[[Callable[..., Any]], Any]: ...


def intrinsic(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """As `numba.extending.intrinsic`, with options or without."""

    def decorate(function: Callable[..., Any]) -> Any:
        def make() -> Any:
            from numba.extending import intrinsic as made

            return made(**options)(function) if options else made(function)

        return Deferred(make, function)

    return decorate if function is None else decorate(function)


def overload(target: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.extending.overload`."""

    def decorate(function: Callable[..., Any]) -> Any:
        def make() -> Any:
            from numba.extending import overload as made

            return made(target, **options)(function)

        return Deferred(make, function)

    return decorate
