"""Two dumps side by side: what differs, equal changes grouped, and what that costs in bytes a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import prod
from typing import Any, Literal

from lowshard import dtypes
from lowshard.errors import RulesError
from lowshard.rules.binding import spec_shards
from lowshard.rules.golden import Dump, mesh_sizes
from lowshard.rules.logical_tensor import group_name, role_of

ChangeKind = Literal["removed", "added", "mesh", "spec", "names", "shape", "field", "order"]

_HEADINGS: Mapping[ChangeKind, str] = {
    "mesh": "meshes that differ",
    "removed": "only in A",
    "added": "only in B",
    "shape": "shapes that differ",
    "names": "logical names that differ",
    "spec": "partition specs that differ",
    "field": "other fields that differ",
    "order": "entries in another order",
}


@dataclass(frozen=True)
class Change:
    """One change, for all keys that share it: layers, moments, every entry of a mesh."""

    kind: ChangeKind
    group: str
    """The keys' common name: layer numbers are `*`, moments carry their parameter's name."""
    keys: tuple[str, ...]
    before: str
    after: str
    bytes_before: int = 0
    """A device, for all keys together; 0 where no mesh is known."""
    bytes_after: int = 0

    @property
    def bytes_change(self) -> int:
        """Bytes a device holds more (or, negative, less)."""
        return self.bytes_after - self.bytes_before

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind,
            "group": self.group,
            "keys": list(self.keys),
            "before": self.before,
            "after": self.after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_change": self.bytes_change,
        }


@dataclass(frozen=True)
class Comparison:
    """What differs between two dumps."""

    a: str
    b: str
    kind: str
    changes: tuple[Change, ...]
    entries: tuple[int, int]
    bytes_a: int | None = None
    """The state of a device in A; None where the files hold no mesh."""
    bytes_b: int | None = None

    @property
    def same(self) -> bool:
        """True where nothing differs."""
        return not self.changes

    def __str__(self) -> str:
        head = f"A  {self.a}\nB  {self.b}"
        if self.same:
            return f"{head}\nthe same: {self.entries[0]} {self.kind} entries"
        lines = [head]
        for kind, heading in _HEADINGS.items():
            found = [c for c in self.changes if c.kind == kind]
            if not found:
                continue
            lines.append(f"{heading} ({sum(len(c.keys) for c in found)} of {max(self.entries)} entries)")
            for change in found:
                many = f" ({len(change.keys)} entries)" if len(change.keys) > 1 else ""
                lines.append(f"  {change.group}{many}")
                if change.before or change.after:
                    lines.append(f"    A {change.before}")
                    cost = f"   {_signed(change.bytes_change)} a device" if change.bytes_change else ""
                    lines.append(f"    B {change.after}{cost}")
        if self.bytes_a is not None and self.bytes_b is not None:
            lines.append(
                f"bytes a device: A {self.bytes_a:,}, B {self.bytes_b:,}, change {_signed(self.bytes_b - self.bytes_a)}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "a": self.a,
            "b": self.b,
            "kind": self.kind,
            "same": self.same,
            "entries_a": self.entries[0],
            "entries_b": self.entries[1],
            "bytes_a": self.bytes_a,
            "bytes_b": self.bytes_b,
            "changes": [c.to_json() for c in self.changes],
        }


def compare_dumps(a: Dump, b: Dump, *, dtype: object = "float32") -> Comparison:
    """Return what differs between two dumps of one kind, or the keys and shapes of a named and a logical one.

    Args:
        a: what was.
        b: what is.
        dtype: of the tensors, for the bytes; counters are int32.

    Raises:
        RulesError: an activation file beside another kind.
    """
    if a.kind != b.kind and "activations" in (a.kind, b.kind):
        raise RulesError(
            f"dumps of one kind are compared, or a logical with a named one: {a.path} is {a.kind}, {b.path} is {b.kind}"
        )
    itemsize_bytes = dtypes.get(dtype).itemsize_bytes
    changes = _Changes(itemsize_bytes)
    for key in a.entries:
        if key not in b.entries:
            changes.add("removed", key, _shown(a, key), "", a.entries[key], None)
    for key, entry in b.entries.items():
        if key not in a.entries:
            changes.add("added", key, "", _shown(b, key), None, entry)
        else:
            _compare_entry(changes, key, a.entries[key], entry, a, b)
    if a.kind == "activations":
        _compare_order(changes, a, b)
    named = a.kind == b.kind == "named"
    return Comparison(
        a.path,
        b.path,
        a.kind if a.kind == b.kind else "logical and named",
        changes.grouped(),
        (len(a.entries), len(b.entries)),
        sum(_entry_bytes(k, e, itemsize_bytes) for k, e in a.entries.items()) if named else None,
        sum(_entry_bytes(k, e, itemsize_bytes) for k, e in b.entries.items()) if named else None,
    )


class _Changes:
    """Changes by group and content."""

    def __init__(self, itemsize_bytes: int) -> None:
        self._itemsize_bytes = itemsize_bytes
        self._found: dict[tuple[ChangeKind, str, str, str], list[tuple[str, int, int]]] = {}

    def add(
        self,
        kind: ChangeKind,
        key: str,
        before: str,
        after: str,
        entry_a: Mapping[str, Any] | None = None,
        entry_b: Mapping[str, Any] | None = None,
    ) -> None:
        group = "every entry's mesh" if kind == "mesh" else group_name(key)
        sizes = [0 if e is None else _entry_bytes(key, e, self._itemsize_bytes) for e in (entry_a, entry_b)]
        self._found.setdefault((kind, group, before, after), []).append((key, sizes[0], sizes[1]))

    def grouped(self) -> tuple[Change, ...]:
        order = list(_HEADINGS)
        made = [
            Change(
                kind, group, tuple(k for k, _, _ in rows), before, after,
                sum(x for _, x, _ in rows), sum(y for _, _, y in rows),
            )
            for (kind, group, before, after), rows in self._found.items()
        ]  # fmt: skip
        return tuple(sorted(made, key=lambda c: order.index(c.kind)))


def _compare_entry(
    changes: _Changes, key: str, ea: Mapping[str, Any], eb: Mapping[str, Any], a: Dump, b: Dump
) -> None:
    if a.kind == "activations":
        for field, kind in (("logic_axes", "names"), ("PartitionSpec", "spec")):
            if ea[field] != eb[field]:
                changes.add(kind, key, ea[field], eb[field])  # type: ignore[arg-type]
    else:
        if ea["shape"] != eb["shape"]:
            changes.add("shape", key, str(ea["shape"]), str(eb["shape"]), ea, eb)
        if a.kind != b.kind:  # a logical and a named file share keys and shapes only
            if len(ea["partition_spec"]) != len(eb["partition_spec"]):
                changes.add("names", key, str(ea["partition_spec"]), str(eb["partition_spec"]))
            return
        if ea["partition_spec"] != eb["partition_spec"]:
            what: ChangeKind = "spec" if a.kind == "named" else "names"
            changes.add(what, key, _spec_text(ea["partition_spec"]), _spec_text(eb["partition_spec"]), ea, eb)
        if ea.get("mesh") != eb.get("mesh"):
            changes.add("mesh", key, _mesh_text(ea), _mesh_text(eb), ea, eb)
    known = {"logic_axes", "PartitionSpec", "shape", "partition_spec", "mesh"}
    for field in sorted((set(ea) | set(eb)) - known):
        if ea.get(field) != eb.get(field) or (field in ea) != (field in eb):
            before = f"{field}: {ea[field]!r}" if field in ea else ""
            changes.add("field", key, before, f"{field}: {eb[field]!r}" if field in eb else "")


def _compare_order(changes: _Changes, a: Dump, b: Dump) -> None:
    keys_a = [k for k in a.entries if k in b.entries]
    keys_b = [k for k in b.entries if k in a.entries]
    if keys_a == keys_b:
        return
    matcher = SequenceMatcher(a=keys_a, b=keys_b, autojunk=False)
    for tag, a0, a1, b0, _ in matcher.get_opcodes():
        if tag in ("delete", "replace"):
            for place, key in enumerate(keys_a[a0:a1], a0):
                changes.add(
                    "order", key, f"entry {place + 1}", f"entry {keys_b.index(key) + 1} (near {b0 + 1})"
                )


def _entry_bytes(key: str, entry: Mapping[str, Any], itemsize_bytes: int) -> int:
    """Return the bytes of an entry on the device that holds most; 0 for an entry without a mesh."""
    if "mesh" not in entry:
        return 0
    shape = entry["shape"]
    spec = tuple(tuple(e) if isinstance(e, list) else e for e in entry["partition_spec"])
    parts = spec_shards(spec, mesh_sizes(entry))
    held: int = prod(-(-n // k) for n, k in zip(shape, parts, strict=False)) * prod(shape[len(parts) :])
    return held * (4 if role_of(key) == "count" else itemsize_bytes)


def _shown(dump: Dump, key: str) -> str:
    entry = dump.entries[key]
    if dump.kind == "activations":
        return f"{entry['logic_axes']} {entry['PartitionSpec']}"
    return f"{_spec_text(entry['partition_spec'])} {entry['shape']}"


def _spec_text(spec: list[Any]) -> str:
    return f"[{', '.join('-' if e is None else '+'.join(e) if isinstance(e, list) else e for e in spec)}]"


def _mesh_text(entry: Mapping[str, Any]) -> str:
    if "mesh" not in entry:
        return "none"
    return " ".join(f"{axis}={n}" for axis, n in mesh_sizes(entry).items())


def _signed(number: int) -> str:
    return f"{number:+,} bytes"
