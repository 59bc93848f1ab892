"""What an object file says of itself, read before the dynamic loader of LLVM sees it: that ends the process where it is
not whole.

Object files are ELF64, little-endian and relocatable (System V ABI, chapters 4 and 5).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"), ("size", "<u8"),
     ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")]
)  # fmt: skip
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_RELOCATABLE, _64_BITS, _LITTLE = 1, 2, 1
_MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243}
_SYMBOLS, _WITH_ADDENDS, _NO_BITS, _WITHOUT_ADDENDS = 2, 4, 8, 9
_EXECUTABLE = 4
_SPECIAL = 0xFF00
"""Section numbers from here on stand for no section: absolute values, common data."""


@dataclass(frozen=True)
class Symbols:
    """The names of an object file."""

    functions: frozenset[str]
    called: tuple[str, ...]


def symbols_of(code: bytes) -> Symbols:
    """Return the names of an object file for this machine."""
    sections = _sections(code)
    tables = sections[sections["type"] == _SYMBOLS]
    _require(len(tables) == 1, "it has one symbol table")
    symbols = _rows(code, tables[0], _SYMBOL)
    _require(int(tables[0]["link"]) < len(sections), "its symbols have names")
    names = _bytes(code, sections[int(tables[0]["link"])])
    homes = symbols["section"]
    inside = (homes > 0) & (homes < _SPECIAL)
    _require(bool((homes[inside] < len(sections)).all()), "its symbols are in its sections")
    ends = symbols["value"][inside] + symbols["size"][inside]
    _require(bool((ends <= sections["size"][homes[inside]]).all()), "its symbols are in its sections")
    for section in sections:
        _check_relocations(code, section, sections, len(symbols))
    functions, called = set(), []
    for name, home in zip(symbols["name"].tolist(), homes.tolist(), strict=True):
        end = names.find(b"\0", name)
        _require(end >= 0, "its symbols have names")
        text = names[name:end].decode()
        if home == 0 and text:
            called.append(text)
        elif 0 < home < _SPECIAL and int(sections["flags"][home]) & _EXECUTABLE:
            functions.add(text)
    return Symbols(frozenset(functions), tuple(called))


def _sections(code: bytes) -> np.ndarray:
    _require(len(code) >= _HEADER.size, "it has a header")
    magic, width, order, *_, kind, machine, _, _, _, at, _, _, _, _, entry, count, _ = _HEADER.unpack_from(
        code
    )
    known = _MACHINES.get(os.uname().machine, machine)
    _require((magic, width, order) == (b"\x7fELF", _64_BITS, _LITTLE), "it is an ELF file of 64 bits")
    _require((kind, machine) == (_RELOCATABLE, known), "it is an object file for this machine")
    _require(entry == _SECTION.itemsize and count > 0, "it has sections")
    _require(at + count * entry <= len(code), "its sections lie within it")
    sections: np.ndarray = np.frombuffer(code, _SECTION, count, at)
    stored = sections[sections["type"] != _NO_BITS]
    # Each term by itself: their sum may wrap.
    fits = (stored["offset"] <= len(code)) & (stored["size"] <= len(code))
    _require(bool(fits.all()), "its sections lie within it")
    _require(bool((stored["offset"] + stored["size"] <= len(code)).all()), "its sections lie within it")
    return sections


def _check_relocations(code: bytes, section: np.void, sections: np.ndarray, symbols: int) -> None:
    _require(int(section["type"]) != _WITHOUT_ADDENDS, "its relocations have addends")
    if int(section["type"]) != _WITH_ADDENDS:
        return
    _require(int(section["info"]) < len(sections), "its relocations are of its sections")
    rows, size = _rows(code, section, _RELOCATION), int(sections[int(section["info"])]["size"])
    fits = bool((rows["offset"] < size).all() and (rows["symbol"] < symbols).all())
    _require(fits, "its relocations are of its sections")


def _rows(code: bytes, section: np.void, kind: np.dtype[np.void]) -> np.ndarray:
    _require(int(section["size"]) % kind.itemsize == 0, "its tables are whole")
    rows: np.ndarray = np.frombuffer(_bytes(code, section), kind)
    return rows


def _bytes(code: bytes, section: np.void) -> bytes:
    begin = int(section["offset"])
    return code[begin : begin + int(section["size"])]


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"this is not an object file that can be used: {rule} where it is one")
