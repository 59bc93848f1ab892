"""Tensors with logical names: names, shapes and a dtype; no array."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowshard import dtypes
from lowshard.argument import instance, items, quoted, wholes
from lowshard.bounded import bounded_cache
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.rules.resolution import LogicalNames, checked_names

Role = Literal["parameter", "moment", "count"]

_STATE = re.compile(r"\.opt_state/(?:.*?)\.(?P<moment>mu|nu)(?:/|\Z)")
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]")
# A layer's number: a component of its own, or behind the word layer or block. Not the 0 of wi_0.
_NUMBER = re.compile(
    r"(?:(?<=[/.])|(?<=^))\d+(?=[/.]|$)|(?<=layers_|blocks_)\d+|(?<=layer_|block_)\d+", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of a model or train state."""

    name: str
    """Its key: a name of a checkpoint, or a path of MaxText's dumps."""
    names: LogicalNames
    """A logical name or None for each dim."""
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def role(self) -> Role:
        """Whether it is a parameter, an optimizer moment, or a counter of the train state."""
        return role_of(self.name)


def role_of(name: str) -> Role:
    """Return the role of a key of a train state; a name of any other form is a parameter."""
    if _STATE.match(name):
        return "moment"
    if name == ".step" or name.startswith(".opt_state/"):
        return "count"
    return "parameter"


def short_name(name: str) -> str:
    """Return a key without its quoting and state prefix: `decoder/decoder_norm/scale`."""
    text = _KEY.sub(lambda m: m[1] if m[1] is not None else m[2], name)
    text = re.sub(r"\A\.params/params/", "", text)
    match = re.match(r"\.opt_state/.*?\.(mu|nu)/params/(.*)", text)
    return f"{match[2]} ({match[1]})" if match else text


@bounded_cache(4 << 20)
def group_name(name: str) -> str:
    """Return a key that all layers, and all moments, of one parameter share: numbers become `*`."""
    text = re.sub(r" \((?:mu|nu)\)\Z", "", short_name(name))
    return _NUMBER.sub("*", text)


def as_tensors(given: object, dtype: object = "float32") -> tuple[LogicalTensor, ...]:
    """Return tensors from any of the accepted forms."""
    default = dtypes.get(dtype).name
    if isinstance(given, Mapping):
        return tuple(_tensor(name, value, default) for name, value in given.items())
    if isinstance(given, LogicalTensor):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = items(given, "tensors are LogicalTensor values", RulesError)
        if all(isinstance(t, LogicalTensor) for t in found):
            return found
    raise RulesError(
        "tensors are LogicalTensor values, or a mapping of name to (logical names, shape), "
        f"got {quoted(given)}"
    )


def _tensor(name: object, value: Any, default: str) -> LogicalTensor:
    if isinstance(value, LogicalTensor):
        return value
    if not isinstance(name, str):
        raise RulesError(f"a tensor's name is text, got {quoted(name)}")
    dtype: object = None
    if isinstance(value, Mapping) and {"partition_spec", "shape"} <= set(value):
        names, shape = value["partition_spec"], value["shape"]
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) in (2, 3):
        names, shape = value[0], value[1]
        dtype = value[2] if len(value) == 3 else None
    else:
        raise RulesError(
            f"tensor {quoted(name)}: give (logical names, shape) or (logical names, shape, dtype), got {quoted(value)}"
        )
    extents = checked_shape(shape, name)
    if dtype is None:
        dtype = "int32" if role_of(name) == "count" else default
    return LogicalTensor(name, checked_names(names), extents, dtypes.get(dtype).name)


def checked_shape(shape: object, name: str) -> tuple[int, ...]:
    """Return a shape as a tuple of extents >= 0, or raise RulesError that names the tensor."""
    if isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape):
        return shape
    return wholes(shape, f"tensor {quoted(name)}: a shape is a list of whole numbers >= 0", RulesError, 0)


def checked_mesh(mesh: object) -> DeviceMesh:
    """Return a mesh, or raise RulesError."""
    return instance(
        mesh, DeviceMesh, "mesh is a DeviceMesh, such as rules.mesh(devices=16) gives", RulesError
    )
