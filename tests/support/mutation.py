"""Random damage to plain data and to texts: what a file may hold after a bad disk, a bad editor or a bad neighbour."""

from __future__ import annotations

import copy
import json
import pickletools
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "R", "S0",
    "S9:ceil", "P:avg",
    "float64", "\ud800", "é", "a" * 5000, [], {}, [[]], [1, 2], [None], {"a": 1}, 1 << 31, 1 << 62, 1 << 64, -(1 << 63),
    10**400,
    50_000_000, 1_000_000_000, 10**9, "10" * 3000,
)  # fmt: skip


def _deep(levels: int) -> Any:
    data: Any = []
    for _ in range(levels):
        data = [data]
    return data


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of plain data."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for key, value in entries:
        found += [(data, key), *places(value)]
    return found


def mutated(data: Any, rng: random.Random) -> Any:
    """Return plain data with one to three of its values changed, taken out, doubled or moved."""
    made = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        slots = places(made)
        if not slots:
            return rng.choice(ODD)
        holder, key = rng.choice(slots)
        kind = rng.randrange(9)
        if kind < 4:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            other, name = rng.choice(slots)
            holder[key] = copy.deepcopy(other[name])
        elif kind == 6 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif kind == 6:
            holder[rng.choice(("note", "_digest", "src", ""))] = copy.deepcopy(holder[key])
        elif isinstance(holder[key], int) and kind == 7:
            holder[key] += rng.choice((-2, -1, 1, 2, 8))
        elif kind == 8 and rng.random() < 0.1:
            holder[key] = _deep(rng.choice((40, 150)))  # three at most: Python copies no more levels
        elif isinstance(holder[key], str):
            holder[key] = spoilt(holder[key].encode("utf-8", "replace"), rng).decode("utf-8", "replace")
    return made


def spoilt(text: bytes, rng: random.Random) -> bytes:
    """Return a text with a few of its bytes changed, taken out or doubled."""
    raw = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at : at + rng.choice((1, 1, 7, 100))]
        elif kind == 2:
            raw[at:at] = raw[at : at + rng.choice((1, 9, 200))]
        elif kind == 3:
            raw[at:at] = rng.choice(
                (b"[" * 20_000, b"9" * 5000, b"NaN", b"1e999", b"\xe9", b"\x00", b"{}", b'"', b"-")
            )
        elif kind == 4 and at < len(raw):
            raw[at] = rng.choice(b'0123456789[]{},:"-.eE ')
        elif at:
            raw[at - 1 : at] = rng.choice((b",", b"0", b"1", b"[", b"]", b'"', b" "))
    return bytes(raw)


def as_text(data: Any) -> bytes:
    """Return plain data as JSON, with what JSON itself does not have as Python writes it."""
    try:
        return json.dumps(data).encode("utf-8", "surrogatepass")
    except ValueError:  # an integer of too many digits
        return b"1" * 5000


def planted(raw: bytes, rng: random.Random) -> bytes:
    """Return a pickle, or a file with one, with a call that ends the process: exit code 77 says that it was made."""
    call, known = b"cposix\n_exit\n(KMtR", b"ctorch._utils\n_rebuild_tensor_v2\n"
    if known in raw:
        return raw.replace(known, call.ljust(len(known), b"N"), 1)
    opcodes = [at for op, _, at in pickletools.genops(raw) if op.name not in ("PROTO", "FRAME")]
    at = rng.choice(opcodes)
    return raw[:at] + call + raw[at:]
