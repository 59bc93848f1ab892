"""The description of a model: named parameters, and units that are gathered and reduced together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowshard import dtypes
from lowshard.argument import MOST_ELEMS, as_shape, brief, instance, is_text, mapping, truth, whole
from lowshard.errors import LayoutError

Keep = int | Literal["row", "tensor"]


@dataclass(frozen=True)
class Param:
    """One parameter of a unit.

    Attributes:
        name: within its unit; with the unit's in front ("l0.w") it is unique in the model.
        shape: of the whole array; () is a scalar.
        dtype: of the values that `open` gives, unless `Precision.compute` says another.
        trainable: False: no gradient and no optimizer state exist for it.
        tie: the name of another parameter of the same shape whose storage this one is: of the same unit ("w"), or
            of any ("emb.w"). Gradients of both are written, or added, to one array.
        keep: elements that are never split by a shard boundary, counted from the parameter's first; "row" is one
            index of the first dim, "tensor" the whole.
        ignored: True: every rank holds it whole; it is opened, but never gathered, reduced or updated.

    Raises:
        LayoutError: a name, shape, tie or keep that cannot be.
        DTypeError: dtype is not in the table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    tie: str | None = None
    keep: Keep = 1
    ignored: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name or not is_text(self.name):
            raise LayoutError(
                f"a parameter's name is a text without '.' that UTF-8 can write, got {brief(self.name)}"
            )
        rule = f"parameter {self.name!r}: a shape is a sequence of extents, 0 or more"
        shape = as_shape(self.shape, rule, LayoutError)
        whole(
            math.prod(shape),
            f"parameter {self.name!r}: elements of {brief(shape)}",
            LayoutError,
            0,
            MOST_ELEMS,
        )
        object.__setattr__(self, "shape", shape)
        row = dtypes.get(self.dtype)
        if row.kind != "float" or row.bits < 16:
            raise LayoutError(
                f"parameter {self.name!r} is float64, float32, float16 or bfloat16, got {row.name}; keep other "
                "arrays beside the model"
            )
        object.__setattr__(self, "dtype", row.name)
        if not isinstance(self.keep, str) or self.keep not in ("row", "tensor"):
            rule = f"parameter {self.name!r}: keep is a number of elements, 'row' or 'tensor'"
            object.__setattr__(self, "keep", whole(self.keep, rule, LayoutError, 1))
        if self.tie is not None:
            instance(
                self.tie,
                str,
                f"parameter {self.name!r}: tie is the name of a parameter, or None",
                LayoutError,
            )
        for flag in ("trainable", "ignored"):
            rule = f"parameter {self.name!r}: {flag} is True or False"
            object.__setattr__(self, flag, truth(getattr(self, flag), rule, LayoutError))
        if self.ignored and self.tie is not None:
            raise LayoutError(
                f"parameter {self.name!r} is tied or ignored, not both; ignore the one it is tied to"
            )

    @property
    def elems(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def keep_elems(self) -> int:
        """`keep` as a number of elements, at least 1."""
        if self.keep == "tensor":
            return max(1, self.elems)
        if self.keep == "row":
            return max(1, math.prod(self.shape[1:]))
        return int(self.keep)


Units = Mapping[str, Sequence[Param]]


def check_units(units: Units) -> None:
    """Raise LayoutError unless names are unique and every tie leads to an untied parameter of the same shape."""
    rule = "units is a mapping of a unit's name to its Params"
    if not mapping(units, rule, LayoutError):
        raise LayoutError("a model has at least one unit, got none")
    by_name: dict[str, Param] = {}
    for unit, params in units.items():
        instance(params, Sequence, f"{rule}, a sequence", LayoutError)  # type: ignore[type-abstract]
        if not isinstance(unit, str) or not unit or not is_text(unit):
            raise LayoutError(f"a unit's name is a text that UTF-8 can write, got {brief(unit)}")
        for param in params:
            if not isinstance(param, Param):
                raise LayoutError(f"unit {unit!r} lists Param(name, shape), got {type(param).__name__}")
            if f"{unit}.{param.name}" in by_name:
                raise LayoutError(f"unit {unit!r} has two parameters named {param.name!r}")
            by_name[f"{unit}.{param.name}"] = param
    for unit, params in units.items():
        for param in params:
            if param.tie is None:
                continue
            full = f"{unit}.{param.name}"
            target = by_name.get(tie_target(unit, param, units))
            if target is None or target is param:
                raise LayoutError(
                    f"{full} is tied to {param.tie!r}, which is no other parameter; write 'name', or 'unit.name'"
                )
            if target.tie is not None or target.ignored or target.shape != param.shape:
                raise LayoutError(
                    f"{full} {param.shape} is tied to {param.tie!r} {target.shape}: a tie leads to a parameter of the "
                    "same shape that is neither tied nor ignored itself"
                )
            if target.dtype != param.dtype or target.trainable != param.trainable:
                raise LayoutError(
                    f"{full} and {param.tie!r} are one storage: same dtype, both trainable or neither"
                )


def tie_target(unit: str, param: Param, units: Units) -> str:
    """Return the full name of what a tied parameter is tied to."""
    assert param.tie is not None
    if any(other.name == param.tie for other in units[unit]):
        return f"{unit}.{param.tie}"
    return param.tie
