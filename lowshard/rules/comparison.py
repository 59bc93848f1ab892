"""Compares two dumps of one kind; equal changes of layers and moments are one entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowshard.errors import RulesError
from lowshard.rules.golden import Dump
from lowshard.rules.logical_tensor import group_name


@dataclass(frozen=True)
class Change:
    """A difference, for all keys that share it."""

    field: str
    """The field of the entries, or "entry" where A or B has none of that name, or "order"."""
    group: str
    """The keys' common name: layer numbers are `*`, moments carry their parameter's name."""
    keys: tuple[str, ...]
    a: str
    b: str


@dataclass(frozen=True)
class Comparison:
    """What differs between two dumps."""

    a: str
    b: str
    kind: str
    entries: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [f"A  {self.a}", f"B  {self.b}"]
        if not self.changes:
            lines.append(f"the same: {self.entries} {self.kind} entries")
        for c in self.changes:
            many = f" ({len(c.keys)} entries)" if len(c.keys) > 1 else ""
            lines += [f"{c.field} of {c.group}{many}", f"    A {c.a}", f"    B {c.b}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"same": not self.changes} | asdict(self)


def compare_dumps(a: Dump, b: Dump) -> Comparison:
    """Return what differs between two dumps of one kind."""
    if a.kind != b.kind:
        raise RulesError(f"dumps of one kind are compared: {a.path} is {a.kind}, {b.path} is {b.kind}")
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for key in dict.fromkeys((*a.entries, *b.entries)):
        one, other = (_fields(dump.entries.get(key, {})) for dump in (a, b))
        if key not in a.entries or key not in b.entries:
            texts = (" ".join(v for field, v in f.items() if field != "mesh") for f in (one, other))
            one, other = ({"entry": text} if text else {} for text in texts)
        for field in dict.fromkeys((*one, *other)):
            before, after = one.get(field, "-"), other.get(field, "-")
            if before != after:
                group = "all entries" if field == "mesh" else group_name(key)
                found.setdefault((field, group, before, after), []).append(key)
    changes = [Change(f, group, tuple(keys), x, y) for (f, group, x, y), keys in found.items()]
    orders = [[key for key in dump.entries if key in a.entries and key in b.entries] for dump in (a, b)]
    if a.kind == "activations" and orders[0] != orders[1]:
        x, y = next((x, y) for x, y in zip(*orders, strict=True) if x != y)
        changes.append(Change("order", "all entries", (x, y), f"{x} is here", f"{y} is here"))
    return Comparison(a.path, b.path, a.kind, len(a.entries), tuple(changes))


def _fields(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an entry as text."""
    texts = {field: value if isinstance(value, str) else json.dumps(value) for field, value in entry.items()}
    if "mesh" in entry:
        texts["mesh"] = " ".join(f"{axis}={n}" for axis, n in entry["mesh"]["shape"].items())
    if "partition_spec" in entry:
        spec = (e if isinstance(e, list) else ["-" if e is None else e] for e in entry["partition_spec"])
        texts["partition_spec"] = f"[{', '.join('+'.join(axes) for axes in spec)}]"
    return texts
