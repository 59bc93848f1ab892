"""MaxText's sharding dumps: logical, named and activation files, read and written byte for byte.

The form is that of `sharding_dump` (MaxText commit e591f30): JSON with indent 2, ASCII escapes, no final
newline. A logical file maps a key to its logical names and shape; a named file to mesh, partition spec and
shape; an activation file is a list in tracing order.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lowshard.argument import instance, quoted
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.placement import MOST_DIGITS
from lowshard.reading import parse_json, read_text
from lowshard.rules.logical_tensor import LogicalTensor, as_tensors, checked_mesh, checked_shape
from lowshard.rules.resolution import LogicalNames, Spec, without_axes
from lowshard.rules.ruleset import RuleSet

DumpKind = Literal["logical", "named", "activations"]
FILE_NAMES: Mapping[DumpKind, str] = {
    "logical": "logical_shardings.json",
    "named": "named_shardings.json",
    "activations": "input_shardings.json",
}
ACTIVATIONS_KEY = "Activation Sharding Dump"
UNKNOWN = "Unknown"

_ACTIVATION = re.compile(r"(?P<variable>.*): (?P<dtype>\w+)\[(?P<shape>(?:\d+(?:,\d+)*)?)\]\Z", re.DOTALL)

# Activations that MaxText's layers give a ready spec, so that its dump knows no names. These are the names the
# layers ask for (MaxText commit e591f30: attention_op, moe), and the axes they take out afterwards.
_UNNAMED: Mapping[str, tuple[LogicalNames, tuple[str, ...]]] = {
    "attention_op/query": (
        ("activation_batch_attn", "activation_heads", "activation_length", "activation_kv"), ()),
    "attention_op/key": (
        ("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"), ()),
    "attention_op/value": (
        ("activation_batch_attn", "activation_heads", "activation_kv_length", "activation_kv"), ()),
    "moe/w0_kernel": (("exp", None, "mlp_no_fsdp"), ("fsdp",)),
    "moe/w1_kernel": (("exp", None, "mlp_no_fsdp"), ("fsdp",)),
    "moe/wo_kernel": (("exp", "mlp_no_fsdp", None), ("fsdp",)),
    "moe/w0_bias": (("exp", "activation_mlp"), ()),
    "moe/w1_bias": (("exp", "activation_mlp"), ()),
    "moe/wo_bias": (("exp", "activation_embed"), ()),
}  # fmt: skip
_MASK: LogicalNames = ("activation_heads", "activation_length")


@dataclass(frozen=True)
class Dump:
    """One dump file."""

    path: str
    kind: DumpKind
    entries: Mapping[str, Mapping[str, Any]]
    """By key, in file order; of an activation file by key and, for repeated keys, a count behind it."""

    def tensors(self, dtype: object = "float32") -> tuple[LogicalTensor, ...]:
        """Return the tensors of a logical file."""
        if self.kind != "logical":
            raise RulesError(
                f"{self.path}: a logical file ({FILE_NAMES['logical']}) is wanted, this is a {self.kind} one",
                path=self.path,
            )
        return as_tensors(self.entries, dtype)

    def activations(self) -> tuple[Activation, ...]:
        """Return the entries of an activation file, in order."""
        if self.kind != "activations":
            raise RulesError(
                f"{self.path}: an activation file ({FILE_NAMES['activations']}) is wanted, this is a {self.kind} one",
                path=self.path,
            )
        return tuple(_activation(key, entry, self.path) for key, entry in self.entries.items())


@dataclass(frozen=True, slots=True)
class Activation:
    """One entry of an activation file."""

    key: str
    """As the file has it: `file/variable: dtype[d0,d1]`."""
    variable: str
    dtype: str
    shape: tuple[int, ...]
    names: LogicalNames | None
    """None: MaxText's dump did not know them ("Unknown")."""
    spec_text: str
    """The partition spec in the file."""

    def spec(self, rules: RuleSet, mesh: DeviceMesh) -> Spec | None:
        """Return the spec that the rules give; None where the names are unknown to us too."""
        rank = len(self.shape)
        if self.names is not None:
            return rules.resolve_activation(self.names, mesh, rank)
        if self.variable == "attention_op/arr":
            mask = rules.resolve_activation(_MASK, mesh)
            kinds = {("int8", 3): mask, ("int32", 1): mask[1:], ("bool", rank): ()}
            return kinds.get((self.dtype, rank))
        if self.variable not in _UNNAMED:
            return None
        names, removed = _UNNAMED[self.variable]
        spec = rules.resolve_activation(names, mesh, rank)
        return without_axes(spec, (a for a in mesh.axis_names if a not in removed)) if removed else spec


def named_shardings(
    rules: RuleSet, mesh: DeviceMesh, tensors: object, *, dtype: object = "float32"
) -> dict[str, dict[str, Any]]:
    """Return the content of a named file: mesh, partition spec and shape of each tensor, size-1 axes included.

    Raises:
        RulesError: what MaxText fails on for weights: an axis the mesh lacks, a dim that its axes do not
            divide, a name on two dims, more names than dims.
    """
    instance(rules, RuleSet, "rules is a RuleSet, as load_rules returns it", RulesError)
    mesh = checked_mesh(mesh)
    shape = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    out: dict[str, dict[str, Any]] = {}
    for tensor in as_tensors(tensors, dtype):
        spec = rules.bound_spec(mesh, tensor.names, tensor.shape, parameter=tensor.name).spec
        out[tensor.name] = {
            "mesh": {"axis_names": list(mesh.axis_names), "shape": shape},
            "partition_spec": [list(e) if isinstance(e, tuple) else e for e in spec],
            "shape": list(tensor.shape),
        }
    return out


def activation_shardings(
    rules: RuleSet, mesh: DeviceMesh, activations: Sequence[Activation]
) -> dict[str, Any]:
    """Return the content of an activation file, with specs resolved anew."""
    entries = []
    for activation in activations:
        spec = activation.spec(rules, mesh)
        text = activation.spec_text if spec is None else f"P{spec!r}"
        names = UNKNOWN if activation.names is None else repr(activation.names)
        entries.append({activation.key: {"logic_axes": names, "PartitionSpec": text}})
    return {ACTIVATIONS_KEY: entries}


def dump_text(data: object) -> str:
    """Return the text of a dump file: indent 2, ASCII, no final newline."""
    return json.dumps(data, indent=2)


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Return a dump file of any of the three kinds."""
    where = os.fspath(path)
    if not os.path.exists(where):
        raise RulesError(f"{where}: there is no such file", path=where)
    return parse_dump(read_text(where, "dump", partial(RulesError, path=where)), where)


def parse_dump(text: str, path: str = "<text>") -> Dump:
    """Return the dump in a JSON text; raises as `read_dump`."""
    data = parse_json(text, f"{path}: this is not a JSON dump", partial(RulesError, path=path))
    if not isinstance(data, dict):
        raise RulesError(f"{path}: a dump is a JSON object, got {quoted(data)}", path=path)
    if list(data) == [ACTIVATIONS_KEY]:
        return Dump(path, "activations", _activation_entries(data[ACTIVATIONS_KEY], path))
    kind: DumpKind | None = None
    for key, entry in data.items():
        if not isinstance(entry, dict) or not {"partition_spec", "shape"} <= set(entry):
            raise RulesError(
                f"{path}: {quoted(key)}: an entry has partition_spec and shape, and mesh in a named file, "
                f"got {quoted(entry)}",
                path=path,
            )
        this: DumpKind = "named" if "mesh" in entry else "logical"
        if kind not in (None, this):
            raise RulesError(f"{path}: {quoted(key)}: some entries have a mesh and some have none", path=path)
        kind = this
        _check_entry(key, entry, this, path)
    return Dump(path, kind or "logical", data)


def _check_entry(key: str, entry: dict[str, Any], kind: DumpKind, path: str) -> None:
    checked_shape(entry["shape"], key)
    spec = entry["partition_spec"]
    sizes: Any = {}
    if kind == "named":
        mesh = entry["mesh"]
        sizes = mesh.get("shape") if isinstance(mesh, dict) else None
        if (
            not isinstance(sizes, dict)
            or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in sizes.values())
            or mesh.get("axis_names") != list(sizes)
        ):
            raise RulesError(
                f"{path}: {quoted(key)}: a mesh has axis_names, and shape with a size >= 1 for each, got "
                f"{quoted(mesh)}",
                path=path,
            )
    good = isinstance(spec, list)
    for item in spec if good else ():
        axes = [] if item is None else [item] if isinstance(item, str) else item
        good &= isinstance(axes, list) and all(isinstance(a, str) for a in axes)
        good &= kind == "named" or not isinstance(item, list)
        if good and kind == "named":
            good &= all(a in sizes for a in axes)
    if not good:
        form = "mesh axes or lists of them" if kind == "named" else "logical names"
        raise RulesError(
            f"{path}: {quoted(key)}: a partition_spec is a list of null and {form}, got {quoted(spec)}",
            path=path,
        )


def _activation_entries(items: Any, path: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for item in items if isinstance(items, list) else [items]:
        one = isinstance(item, dict) and len(item) == 1
        key, entry = next(iter(item.items())) if one else ("", None)
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(k), str) for k in ("logic_axes", "PartitionSpec")
        ):
            raise RulesError(
                f"{path}: {ACTIVATIONS_KEY!r} is a list of objects {{name: {{logic_axes, PartitionSpec}}}}, "
                f"got {quoted(item)}",
                path=path,
            )
        count = 1
        unique = key
        while unique in entries:
            count += 1
            unique = f"{key} #{count}"
        entries[unique] = entry
    return entries


def _activation(unique: str, entry: Mapping[str, Any], path: str) -> Activation:
    key = re.sub(r"(\]) #\d+\Z", r"\1", unique)
    match = _ACTIVATION.match(key)
    extents = match["shape"].split(",") if match is not None and match["shape"] else []
    if match is None or any(len(n) > MOST_DIGITS for n in extents):
        raise RulesError(
            f"{path}: an activation is called 'file/variable: dtype[d0,d1]', got {quoted(key)}", path=path
        )
    shape = tuple(map(int, extents))
    return Activation(
        key,
        match["variable"],
        match["dtype"],
        shape,
        _names(entry["logic_axes"], key, path),
        entry["PartitionSpec"],
    )


def _names(text: str, key: str, path: str) -> LogicalNames | None:
    if text == UNKNOWN:
        return None
    try:
        names = ast.literal_eval(text) if len(text) < 10_000 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        names = None
    if not isinstance(names, tuple) or not all(n is None or isinstance(n, str) for n in names):
        raise RulesError(
            f"{path}: {quoted(key)}: logic_axes is the text of a tuple of names, or {UNKNOWN}, got {quoted(text)}",
            path=path,
        )
    return names
