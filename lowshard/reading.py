"""The one typed reader of outside data: JSON and YAML to frozen values, with file, line and path of what is wrong.

    bytes --read_text--> text --parse_json, document.parse_document--> plain data --msgspec--> a value

A `Reader` is made of a function or dataclass: its parameters are the keys of an object, its annotations what must stand
there. Nothing is coerced: true and 1.0 are no integers, "1" is text. Integers fit 64 bits, numbers are finite, texts
have a UTF-8 form, no key stands twice, no key is unknown, and nothing nests deeper than `MOST_DEPTH`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lowshard.argument import brief, is_text
from lowshard.argument import path as check_path
from lowshard.document import MAX_FILE_BYTES, Node, Where, parse_document, place_of, plain_data
from lowshard.errors import LowshardError
from lowshard.nearest import nearest

__all__ = ["READERS", "Reader", "open_at_once", "parse_json", "read_text", "reader"]

T = TypeVar("T")

MOST_BYTES = 64_000_000
"""Of a file or a JSON text, where its reader says nothing else."""
MOST_VALUES = 2_000_000
"""Values in a JSON text, where a reader says nothing else."""
MOST_DEPTH = 32
"""Levels of lists and objects."""
_BLOCK_BYTES = 1 << 20
_INT64 = 1 << 63
_HERE = "this data"
_TRIPS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_UNIONS = (Union, types.UnionType)


class _Unfit(ValueError):
    """Data that is not what its place asks for; `error` is the class where a value's own constructor refused it."""

    def __init__(self, text: str, place: str = "", error: type[LowshardError] | None = None) -> None:
        super().__init__(text)
        self.text, self.place, self.error = text, place, error


class Reader(Generic[T]):
    """One format of outside data. Made by `reader`; `READERS` names every one."""

    def __init__(
        self, name: str, error: type[LowshardError], make: Callable[..., T], most_values: int
    ) -> None:
        self.name, self.error = name, error
        self._make, self._most_values = make, most_values

    def __call__(self, data: object, where: str = _HERE, node: Node | None = None) -> T:
        """Return the value that plain data says; `node` is the tree of the YAML file that it comes from."""
        try:
            made: T = _made(self._make, _checked(data))
            return made
        except _Unfit as unfit:
            at = where if node is None else place_of(node, unfit.place)
            if unfit.error is None or unfit.place:
                said = f"{at} is not a valid {self.name}: at ${unfit.place}: {unfit.text}"
            else:  # the error of the value itself says what it is
                said = unfit.text if where == _HERE else f"{at}: {unfit.text}"
            raise (unfit.error or self.error)(said) from unfit.__cause__
        except _TRIPS as error:
            # A value whose constructor trips over what it was given; the type is all that is known.
            raise self.error(
                f"{where} is not a valid {self.name}: {type(error).__name__}: {error}"
            ) from error

    def text(self, text: str, where: str = "this JSON") -> T:
        """Return the value that a JSON text says; raises as a call does."""
        what = f"{where} is not a valid {self.name}"
        if not isinstance(text, str) or len(text) > MOST_BYTES:
            raise self.error(f"{what}: JSON is text of at most {MOST_BYTES} characters, got {brief(text)}")
        return self(parse_json(text, what, self.error, self._most_values), where)

    def file(self, path: str | Path) -> T:
        """Return the value in a JSON file; raises as a call does, and where the file cannot be read."""
        return self.text(read_text(path, self.name, self.error), os.fspath(path))

    def yaml(self, path: str | Path, damaged: type[LowshardError] | None = None) -> T:
        """Return the value in a YAML file; raises as a call does, `damaged` where the file cannot be read."""
        error = damaged or self.error

        def fail(text: str, where: Where) -> LowshardError:
            return error(f"{where}: {text}")

        text = read_text(path, self.name, error, MAX_FILE_BYTES)
        node = parse_document(text, os.fspath(path), fail)
        return self(plain_data(node, fail), os.fspath(path), node)


READERS: dict[str, Reader[Any]] = {}
"""Every reader by name."""
_BY_TYPE: dict[type, Reader[Any]] = {}


def reader(
    name: str, error: type[LowshardError], *, most_values: int = MOST_VALUES
) -> Callable[[Callable[..., T]], Reader[T]]:
    """Return the decorator that makes a function, or a dataclass, the reader of a format.

    Args:
        name: what the format is, to go behind "is not a valid".
        error: the class of its errors.
        most_values: of a JSON text.

    The keys of the object are the function's parameters (`from_` is the key "from"); the class that it returns is read
    by it wherever it stands in another annotation. Annotations are what msgspec takes, dataclasses, classes with a
    reader, and Mapping; lists become tuples.
    """

    def register(make: Callable[..., T]) -> Reader[T]:
        made = READERS[name] = Reader(name, error, make, most_values)
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


def read_text(
    path: str | os.PathLike[str],
    what: str,
    error: Callable[[str], LowshardError],
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the text of a UTF-8 file."""
    file_path = check_path(path, f"a {what} is read from the path of a file", error)
    try:
        with open(file_path, "rb", opener=open_at_once) as file:
            raw = bytearray()  # not read(most_bytes), which takes so much memory at once
            while len(raw) <= most_bytes and (came := file.read(_BLOCK_BYTES)):
                raw += came
    except OSError as failed:
        raise error(f"{path} is not a valid {what}: it cannot be read: {failed.strerror}") from failed
    if len(raw) > most_bytes:
        raise error(f"{path} is not a valid {what}: one has at most {most_bytes} bytes, this file is larger")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        line, byte = raw.count(b"\n", 0, failed.start) + 1, raw[failed.start]
        raise error(
            f"{path}:{line}: a {what} is UTF-8 text, got the byte 0x{byte:02x}; save it as UTF-8"
        ) from failed


def parse_json(
    text: str | bytes, where: str, error: Callable[[str], LowshardError], most_values: int = MOST_VALUES
) -> Any:
    """Return the plain data of a JSON text: no key stands twice in one object."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        values = 1 + sum(map(text.count, ",[{"))
        if values > most_values:
            raise ValueError(f"it has at most {most_values} values, got {values}")
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as failed:
        raise error(f"{where}: it nests too deep") from failed
    except (ValueError, MemoryError) as failed:
        raise error(f"{where}: {failed}") from failed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {brief(twice)} stands twice in one object")
    return found


def _checked(data: Any, depth: int = MOST_DEPTH) -> Any:
    """Return plain data with tuples for its lists: texts with a UTF-8 form, finite numbers, integers of 64 bits."""
    kind = type(data)
    if kind is int:
        if not -_INT64 <= data < _INT64:
            raise _Unfit(f"an integer fits 64 bits, got {brief(data)}")
    elif kind is str:
        if not is_text(data):
            raise _Unfit(f"a text has a UTF-8 form, got {brief(data)}")
    elif kind is float:
        if not math.isfinite(data):
            raise _Unfit(f"a number is finite, got {data}")
    elif data is not None and kind is not bool:
        if not depth:
            raise _Unfit(f"it nests at most {MOST_DEPTH} levels deep")
        at: Any = None
        try:
            if isinstance(data, (list, tuple)):
                made = []
                for at, value in enumerate(data):  # noqa: B007  # said where it fails
                    made.append(_checked(value, depth - 1))
                return tuple(made)
            if not isinstance(data, Mapping):
                raise _Unfit(
                    f"plain data is text, numbers, true, false, null, lists and objects, got {brief(data)}"
                )
            found = {}
            for at, value in data.items():
                if not isinstance(at, str) or not is_text(at):
                    raise _Unfit(f"a key is text, got {brief(at)}")
                found[at] = _checked(value, depth - 1)
            return found
        except _Unfit as unfit:
            unfit.place = ("" if at is None else _step(at)) + unfit.place
            raise
    return data


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key if len(key) <= 60 and key.isprintable() else brief(key)}"


# ---- from plain data to values


def _made(make: Callable[..., Any], data: Any) -> Any:
    """Return what a function or dataclass makes of an object."""
    from msgspec import UNSET

    struct, names = _struct(make)
    try:
        said = _convert(data, struct)
    except _Unfit as unfit:
        unknown = re.match(r"object contains unknown field `(.*)`$", unfit.text, re.DOTALL)
        if unknown and not unfit.place:
            keys = [name.removesuffix("_") for name in names]
            unfit.text = f"{unfit.text}; the keys are {', '.join(keys)}{nearest(unknown[1], keys)}"
        raise
    try:
        return make(**{name: value for name in names if (value := getattr(said, name)) is not UNSET})
    except LowshardError as error:
        raise _Unfit(str(error), error=type(error)) from error


@cache
def _struct(make: Callable[..., Any]) -> tuple[Any, tuple[str, ...]]:
    """Return a msgspec Struct with the parameters of a function or dataclass, and their names."""
    import msgspec

    made: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]  # of this very class
    hints, fields = get_type_hints(made), []
    for name, parameter in inspect.signature(make).parameters.items():
        if not name.startswith("_"):
            kind = _type(hints[name])
            fields.append(
                (name, kind) if parameter.default is parameter.empty else (name, kind, msgspec.UNSET)
            )
    struct = msgspec.defstruct(
        make.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True,
        rename=lambda name: name.removesuffix("_"),
    )  # fmt: skip
    return struct, tuple(name for name, *_ in fields)


class _StandIn(type):
    """The class of classes that stand for an annotation: msgspec asks whether what the hook returns is one of them."""

    def __instancecheck__(cls, value: object) -> bool:
        return True


@cache
def _type(kind: Any) -> Any:
    """Return an annotation as msgspec takes it: classes of their own stand for what `_hook` reads."""
    origin, args = get_origin(kind), get_args(kind)
    if any(_is_object(k) or get_origin(k) is Literal for k in (kind, *(args if origin in _UNIONS else ()))):
        return _StandIn("StandIn", (), {"kind": kind})
    if kind is float:
        return int | float  # an integer stays one, exact
    if origin is tuple:
        return tuple[tuple(_type(a) for a in args)]  # type: ignore[misc]
    return Union[tuple(map(_type, args))] if origin in _UNIONS else kind  # noqa: UP007  # of types made here


def _is_object(kind: Any) -> bool:
    return kind in _BY_TYPE or is_dataclass(kind) or get_origin(kind) is Mapping


def _convert(data: Any, kind: Any, place: str = "") -> Any:
    import msgspec

    try:
        return msgspec.convert(data, kind, dec_hook=_hook)
    except msgspec.ValidationError as failed:
        text, at, inside = str(failed).rpartition(" - at `$")
        text, inside = (text, inside.removesuffix("`")) if at else (str(failed), "")
        cause = failed.__cause__
        if isinstance(cause, _Unfit):
            raise _Unfit(cause.text, place + inside + cause.place, cause.error) from cause.__cause__
        raise _Unfit(text[:1].lower() + text[1:], place + inside) from None


def _hook(stand_in: Any, data: Any) -> Any:
    kind, args = stand_in.kind, get_args(stand_in.kind)
    if get_origin(kind) in _UNIONS:
        return _one_of(args, data)
    if get_origin(kind) is Literal and data in args and not isinstance(data, bool):
        return data
    if get_origin(kind) is Literal or not isinstance(data, Mapping):
        raise _Unfit(f"expected {_said(kind)}, got {brief(data)}")
    if get_origin(kind) is not Mapping:
        return _made(_BY_TYPE[kind]._make if kind in _BY_TYPE else kind, data)
    if args[0] is int and not all(k.isascii() and k.isdecimal() and len(k) < 19 for k in data):
        raise _Unfit(f"keys are integers of 0 or more, as text, got {brief(list(data))}")
    return {args[0](k): _convert(v, _type(args[1]), _step(k)) for k, v in data.items()}


def _one_of(options: tuple[Any, ...], data: Any) -> Any:
    """Return data as the first option that it fits; of the failures the deepest is told, the one that was meant."""
    deepest = _Unfit("expected")
    for option in options:
        if _is_object(option) is isinstance(data, Mapping):
            try:
                return _convert(data, _type(option))
            except _Unfit as unfit:
                deepest = max(
                    deepest, unfit, key=lambda failed: (len(failed.place), failed.text[:8] != "expected")
                )
    if deepest.place or not deepest.text.startswith("expected"):
        raise deepest
    raise _Unfit(f"expected {' or '.join(dict.fromkeys(map(_said, options)))}, got {brief(data)}")


def _said(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    words = {tuple: "an array", types.NoneType: "null"}
    return "an object" if _is_object(kind) else words.get(get_origin(kind) or kind) or str(kind.__name__)
