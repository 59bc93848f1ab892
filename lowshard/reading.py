"""The one typed reader of outside data: files, JSON and plain data to frozen values, with the place of what is wrong.

    bytes --read_text--> text --parse_json, document.parse_document--> plain data --Reader--> a value

A `Reader` is made of a function (or a dataclass) whose parameters are the keys of an object and whose annotations are
what must stand there. Nothing is coerced: true is not an integer, 1.0 is none either, "1" is text. Integers fit int64,
numbers are finite, texts have a UTF-8 form, no key stands twice, no key is unknown.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lowshard.argument import brief, instance, is_text
from lowshard.argument import path as check_path
from lowshard.errors import LowshardError

__all__ = ["READERS", "Reader", "open_at_once", "parse_json", "read_text", "reader"]

T = TypeVar("T")

MOST_BYTES = 64_000_000
"""Of a file or a JSON text, where a reader says nothing else."""
MOST_VALUES = 2_000_000
"""Values in a JSON text, where a reader says nothing else."""
_BLOCK_BYTES = 1 << 20
MOST_DEPTH = 32
"""Levels of lists and objects where the annotation is `Any`; elsewhere the annotations are the bound."""
_INT64 = 1 << 63
_HERE = "this data"
_TRIPS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

_SAID: dict[object, str] = {
    int: "an integer of 64 bits", float: "a finite number", bool: "true or false", str: "text", type(None): "null",
}  # fmt: skip


class _Unfit(Exception):
    """Data that is not what its place asks for."""

    def __init__(self, place: str, expected: str, came: object, missing: bool = False) -> None:
        super().__init__(f"at {place}: expected {expected}, got {'nothing' if missing else brief(came)}")
        self.place = place


class Reader(Generic[T]):
    """One format of outside data. Made by `reader`; `READERS` names every one."""

    def __init__(
        self, name: str, error: type[LowshardError], make: Callable[..., T], most_bytes: int, most_values: int
    ) -> None:
        self.name = name
        self.error = error
        self._make = make
        self._most_bytes, self._most_values = most_bytes, most_values

    def __call__(self, data: object, where: str = _HERE) -> T:
        """Return the value that plain data says."""
        try:
            return self._read(data, "$")
        except _Unfit as error:
            raise self.error(f"{where} is not a valid {self.name}: {error}") from None
        except LowshardError as error:
            if where == _HERE:
                raise
            raise type(error)(f"{where}: {error}") from error
        except _TRIPS as error:
            # A value whose constructor trips over what it was given; the type is all that is known.
            raise self.error(
                f"{where} is not a valid {self.name}: {type(error).__name__}: {error}"
            ) from error

    def text(self, text: str, where: str = "this JSON") -> T:
        """Return the value that a JSON text says; raises as a call does."""
        what = f"{where} is not a valid {self.name}"
        instance(text, str, f"{what}: JSON is text", self.error)
        if len(text) > self._most_bytes:
            raise self.error(f"{what}: it has at most {self._most_bytes} characters, got {len(text)}")
        return self(parse_json(text, what, self.error, self._most_values), where)

    def file(self, path: str | Path) -> T:
        """Return the value in a JSON file; raises as a call does, and where the file cannot be read."""
        return self.text(read_text(path, self.name, self.error, self._most_bytes), os.fspath(path))

    # ---- inside

    @cached_property
    def _keys(self) -> dict[str, tuple[str, Any, bool]]:
        """By key: the parameter, what it takes, and whether it must be there."""
        return _keys_of(self._make)

    def _read(self, data: object, place: str) -> T:
        made: T = _call(self._make, self._keys, _said_of(self), data, place)
        return made


READERS: dict[str, Reader[Any]] = {}
"""Every reader by name."""
_BY_TYPE: dict[type, Reader[Any]] = {}


def reader(
    name: str, error: type[LowshardError], *, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES
) -> Callable[[Callable[..., T]], Reader[T]]:
    """Return the decorator that makes a function, or a dataclass, the reader of a format.

    Args:
        name: what the format is, to go behind "is no".
        error: the class of its errors.
        most_bytes: of a file or text.
        most_values: of a text.

    The keys of the object are the function's parameters (`from_` is the key "from"), the class it returns is read by it
    wherever it stands in another annotation. Annotations are int, float, bool, str, None, Literal, unions,
    tuple[X, ...], tuple[X, Y], Mapping[str, X], Mapping[int, X] (keys are decimal text), dataclasses, types with a
    reader, and Any for plain data (its lists come as tuples).
    """

    def register(make: Callable[..., T]) -> Reader[T]:
        made = Reader(name, error, make, most_bytes, most_values)
        before = READERS.get(name)
        assert before is None or before._make.__module__ == make.__module__, (
            f"two readers are called {name!r}"
        )
        READERS[name] = made
        kind = make if isinstance(make, type) else get_type_hints(make)["return"]
        if isinstance(kind, type):
            _BY_TYPE[kind] = made
        return made

    return register


# ---- from bytes to plain data


def open_at_once(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, for `open(..., opener=...)`, without waiting: a FIFO that nobody writes to is empty."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    return fd


def read_text(path: str | Path, what: str, error: type[LowshardError], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file."""
    file_path = check_path(path, f"a {what} is read from the path of a file", error)
    try:
        with open(file_path, "rb", opener=open_at_once) as file:
            raw = bytearray()  # not read(most_bytes), which takes so much memory at once
            while len(raw) <= most_bytes and (came := file.read(_BLOCK_BYTES)):
                raw += came
    except (OSError, ValueError) as failed:  # ValueError: a NUL in the path
        reason = getattr(failed, "strerror", None) or failed
        raise error(f"{path} is not a valid {what}: it cannot be read: {reason}") from failed
    if len(raw) > most_bytes:
        raise error(f"{path} is not a valid {what}: one has at most {most_bytes} bytes, this file is larger")
    try:
        return raw.decode()
    except UnicodeDecodeError as failed:
        raise error(
            f"{path} is not a valid {what}: it is UTF-8 text, got the byte 0x{raw[failed.start]:02x} at "
            f"offset {failed.start}; save it as UTF-8"
        ) from failed


def parse_json(
    text: str | bytes, where: str, error: type[LowshardError], most_values: int = MOST_VALUES
) -> Any:
    """Return the plain data of a JSON text: no key twice in one object, no integer of more than 20 characters."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        values = 1 + sum(map(text.count, ",[{"))
        if values > most_values:
            raise ValueError(f"it has at most {most_values} values, got {values}")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant)
    except RecursionError as failed:
        raise error(f"{where}: it nests too deep") from failed
    except (ValueError, MemoryError) as failed:
        raise error(f"{where}: {failed}") from failed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {brief(twice)} stands twice in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"an integer fits 64 bits, got one of {len(text)} characters")
    return int(text)


def _constant(text: str) -> float:
    raise ValueError(f"a number is finite, got {text}")


# ---- from plain data to values


def _keys_of(make: Callable[..., Any]) -> dict[str, tuple[str, Any, bool]]:
    made: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]  # of this very class
    hints, parameters = get_type_hints(made), inspect.signature(make).parameters
    return {
        name.removesuffix("_"): (name, hints[name], parameter.default is parameter.empty)
        for name, parameter in parameters.items()
        if not name.startswith("_")
    }


def _call(
    make: Callable[..., Any], keys: Mapping[str, tuple[str, Any, bool]], what: str, data: object, place: str
) -> Any:
    if not isinstance(data, Mapping):
        raise _Unfit(place, what, data)
    given = {}
    for key, value in data.items():
        if key not in keys:
            raise _Unfit(place, f"the keys {', '.join(keys)}", key)
        name, kind, _ = keys[key]
        given[name] = _decode(kind, value, f"{place}.{key}")
    for key, (_, kind, needed) in keys.items():
        if needed and key not in data:
            raise _Unfit(f"{place}.{key}", _said(kind), None, missing=True)
    try:
        return make(**given)
    except LowshardError as error:
        if place == "$":
            raise
        raise type(error)(f"at {place}: {error}") from error


def _decode(kind: Any, data: object, place: str) -> Any:
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]._read(data, place)
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _plain(data, place, MOST_DEPTH)
    if kind in _SAID:
        return _scalar(kind, data, place)
    if origin is Literal:
        if any(type(data) is type(option) and data == option for option in args):
            return data
        raise _Unfit(place, _said(kind), data)
    if origin in (Union, types.UnionType):
        return _one_of(kind, args, data, place)
    if origin is tuple or origin is Sequence:
        return _many(kind, args, data, place)
    if origin is Mapping:
        if not isinstance(data, Mapping):
            raise _Unfit(place, _said(kind), data)
        return {_key(args[0], k, place): _decode(args[1], v, f"{place}.{_short(k)}") for k, v in data.items()}
    assert isinstance(kind, type), f"no data is read as {kind!r}"
    assert is_dataclass(kind), f"no data is read as {kind!r}"
    return _call(kind, _keys_of_dataclass(kind), _said(kind), data, place)


def _scalar(kind: Any, data: object, place: str) -> Any:
    good = type(data) is kind or (kind is float and type(data) is int)
    if isinstance(data, int):
        good = good and -_INT64 <= data < _INT64
    elif isinstance(data, float):
        good = good and math.isfinite(data)
    elif isinstance(data, str):
        good = good and is_text(data)
    if not good:
        raise _Unfit(place, _said(kind), data)
    return data


def _one_of(kind: Any, options: Sequence[Any], data: object, place: str) -> Any:
    failed: _Unfit | None = None
    for option in options:
        try:
            return _decode(option, data, place)
        except _Unfit as error:  # the option that went deepest is the one that was meant
            if error.place != place and (failed is None or len(error.place) > len(failed.place)):
                failed = error
    raise failed or _Unfit(place, _said(kind), data)


def _many(kind: Any, args: Sequence[Any], data: object, place: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise _Unfit(place, _said(kind), data)
    if args[-1] is Ellipsis or get_origin(kind) is Sequence:
        kinds = [args[0]] * len(data)
    elif len(args) != len(data):
        raise _Unfit(place, _said(kind), data)
    else:
        kinds = list(args)
    return tuple([_decode(k, v, f"{place}[{i}]") for i, (k, v) in enumerate(zip(kinds, data, strict=True))])


def _key(kind: Any, key: object, place: str) -> Any:
    if not isinstance(key, str) or not is_text(key):
        raise _Unfit(place, "keys that are text", key)
    if kind is str:
        return key
    if not (key.isascii() and key.isdecimal() and len(key) < 19):
        raise _Unfit(place, "keys that are integers >= 0 as text", key)
    return int(key)


def _plain(data: object, place: str, depth: int) -> Any:
    """Return data without types: its lists as tuples, its scalars checked like all others."""
    if depth == 0:
        raise _Unfit(place, f"at most {MOST_DEPTH} levels", data)
    if isinstance(data, (list, tuple)):
        return tuple(_plain(v, f"{place}[{i}]", depth - 1) for i, v in enumerate(data))
    if isinstance(data, Mapping):
        return {_key(str, k, place): _plain(v, f"{place}.{_short(k)}", depth - 1) for k, v in data.items()}
    if type(data) not in _SAID:
        raise _Unfit(place, "plain data (text, numbers, true, false, null, lists, objects)", data)
    return _scalar(type(data), data, place)


_FIELDS: dict[Any, dict[str, tuple[str, Any, bool]]] = {}


def _keys_of_dataclass(kind: Any) -> dict[str, tuple[str, Any, bool]]:
    found = _FIELDS.get(kind)
    if found is None:
        found = _FIELDS[kind] = _keys_of(kind)
    return found


# ---- words


def _said(kind: Any) -> str:
    """Return what an annotation asks for, as words."""
    if kind in _SAID:
        return _SAID[kind]
    if kind in _BY_TYPE:
        return _said_of(_BY_TYPE[kind])
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_said, args)))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}"
    if origin in (tuple, Sequence):
        return "a list"
    return "plain data" if kind is Any else "an object"


def _said_of(known: Reader[Any]) -> str:
    return f"a {known.name} (an object)"


def _short(key: object) -> str:
    return key if isinstance(key, str) and len(key) <= 60 and key.isprintable() else brief(key)
