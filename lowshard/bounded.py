"""What is kept to be used again: in the process up to a number of bytes, in an object for as long as that lives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

__all__ = ["MOST_BYTES", "BoundedCache", "bounded_cache", "keeps_hash", "kept_in_self", "size_of"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
S = TypeVar("S")
C = TypeVar("C", bound=type)

MOST_BYTES: dict[str, int] = {}
"""The bound of every cache there is in this process, in bytes, by name; docs/limits.md has the table."""

_ENTRY_BYTES = 160
"""What a dict and a tuple of arguments take for an entry."""
_ALL_OF = 4
_DEPTH = 12


def size_of(value: Any, depth: int = _DEPTH) -> int:
    """Return about how many bytes a value of plain data takes; of long containers some items stand for all."""
    size = sys.getsizeof(value, 64)
    if depth == 0 or isinstance(value, (int, float, str, bytes, type)):
        return size
    if isinstance(value, dict):
        items: list[Any] = [item for pair in list(value.items()) for item in pair]
    elif isinstance(value, (tuple, list, set, frozenset)):
        items = list(value)
    else:
        fields = [list(getattr(value, "__dict__", {}).values())]
        fields += [
            [getattr(value, name, None) for name in getattr(kind, "__slots__", ())]
            for kind in type(value).__mro__
        ]
        return size + sum(size_of(item, depth - 1) for found in fields for item in found)
    some = items if len(items) <= _ALL_OF else [items[0], items[1], items[len(items) // 2], items[-1]]
    return size + sum(size_of(item, depth - 1) for item in some) * len(items) // max(1, len(some))


class BoundedCache(Generic[K, V]):
    """A mapping that keeps the newest of what it was given, up to a number of bytes; the oldest go first."""

    def __init__(self, name: str | None, most_bytes: int, size: Callable[[K, V], int]) -> None:
        if name is not None:
            MOST_BYTES[name] = most_bytes
        self.most_bytes, self.used_bytes = most_bytes, 0
        self._size = size
        self._entries: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._lock = threading.Lock()
        self.get = self._entries.get

    def put(self, key: K, value: V) -> V:
        """Keep a value, and return it."""
        with self._lock:
            newest = next(reversed(self._entries), None)
            if newest is not None and newest not in self._sizes:
                self._sizes[newest] = self._size(newest, self._entries[newest])
                self.used_bytes += self._sizes[newest]
            self._drop(key)
            self._entries[key] = value
            while self.used_bytes > self.most_bytes:
                self._drop(next(iter(self._sizes)))
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._sizes.clear()
            self.used_bytes = 0

    def _drop(self, key: K) -> None:
        self._entries.pop(key, None)
        self.used_bytes -= self._sizes.pop(key, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries


def bounded_cache(most_bytes: int) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """As `functools.cache` for a pure function, but for its bound: beyond it everything is forgotten.

    A call that is known costs what it costs with `functools.cache`.

    Args:
        most_bytes: of all results and what leads to them, about. What arguments refer to is not counted.
    """

    def decorate(function: Callable[P, V]) -> Callable[P, V]:
        MOST_BYTES[f"{function.__module__}.{function.__qualname__}"] = most_bytes
        used_bytes = 0

        def make(*args: P.args, **kwargs: P.kwargs) -> V:
            nonlocal used_bytes
            made = function(*args, **kwargs)
            used_bytes += _ENTRY_BYTES + sum(map(sys.getsizeof, args)) + size_of(made)
            if used_bytes > most_bytes:
                kept.cache_clear()
                used_bytes = 0
            return made

        kept = lru_cache(maxsize=None)(make)
        return update_wrapper(kept, function)  # type: ignore[return-value]

    return decorate


def kept_in_self(method: Callable[Concatenate[S, P], V]) -> Callable[Concatenate[S, P], V]:
    """As `functools.cache` for a method that depends on its arguments and a frozen self alone."""
    name = f"_kept_{method.__name__}"

    def call(self: S, /, *key: P.args, **no_keywords: P.kwargs) -> V:
        kept: dict[Any, V] = self.__dict__.setdefault(name, {})
        found = kept.get(key, kept)  # itself stands for nothing
        if found is kept:
            found = kept[key] = method(self, *key, **no_keywords)
        return found  # type: ignore[return-value]

    return update_wrapper(call, method)


def keeps_hash(kind: C) -> C:
    """Have a frozen class work out the hash of an object once, for tables in which it is looked up often."""
    work_out = vars(kind)["__hash__"]

    def kept_hash(self: Any) -> int:
        try:
            found: int = self._kept_hash
        except AttributeError:
            found = work_out(self)
            object.__setattr__(self, "_kept_hash", found)
        return found

    kind.__hash__ = kept_hash  # type: ignore[method-assign, assignment]
    return kind
