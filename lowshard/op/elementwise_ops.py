"""Kernels of ops that work element by element."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.kernels.erf import erf
from lowshard.op.op_part import Array, Part, converted, in_accumulator, kernel

_INV_SQRT2 = math.sqrt(0.5)


def _erf(xp: Any, x: Array) -> Array:
    if xp is np:
        return erf(x)
    from cupyx.scipy.special import erf as device_erf

    return device_erf(x)


def sigmoid(xp: Any, x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), by the one of exp(-x) and exp(x) that cannot overflow."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


_UNARY: dict[str, Callable[[Any, Array], Array]] = {
    "relu": lambda xp, x: xp.maximum(x, 0),
    "abs": lambda xp, x: xp.abs(x),
    "exp": lambda xp, x: xp.exp(x),
    "log": lambda xp, x: xp.log(x),
    "sqrt": lambda xp, x: xp.sqrt(x),
    "rsqrt": lambda xp, x: 1 / xp.sqrt(x),
    "sigmoid": sigmoid,
    "silu": lambda xp, x: x * sigmoid(xp, x),
    "gelu": lambda xp, x: 0.5 * x * (1 + _erf(xp, x * _INV_SQRT2)),
    "tanh": lambda xp, x: xp.tanh(x),
    "sin": lambda xp, x: xp.sin(x),
    "cos": lambda xp, x: xp.cos(x),
    "erf": _erf,
    "floor": lambda xp, x: xp.floor(x),
    "round": lambda xp, x: x.copy() if x.dtype.kind in "iub" else xp.rint(x),  # rint makes floats of integers
    "trunc": lambda xp, x: xp.trunc(x),
    "log1p": lambda xp, x: xp.log1p(x),
    "atanh": lambda xp, x: xp.arctanh(x),
    "acos": lambda xp, x: xp.arccos(x),
    "negate": lambda xp, x: xp.negative(x),
}


@kernel(*_UNARY)
def unary(part: Part, x: Array) -> Array:
    """Computed in the accumulator's type, rounded once."""
    return _UNARY[part.op](part.xp, in_accumulator(x))


_TESTS = {"is_nan": "isnan", "is_inf": "isinf", "logical_not": "logical_not"}


@kernel(*_TESTS)
def test(part: Part, x: Array) -> Array:
    """NaN, infinity, zero."""
    return getattr(part.xp, _TESTS[part.op])(x)


@kernel("cast", "dequantize", "passthrough")
def cast(part: Part, x: Array) -> Array:
    """A copy in the result's dtype."""
    made = converted(part.xp, x, dtypes.get(part.action.outputs[0].dtype))
    return x.copy() if made is x else made


_SCALAR = {"mul_scalar": operator.mul, "add_scalar": operator.add, "pow_scalar": operator.pow}


@kernel(*_SCALAR)
def scalar(part: Part, x: Array) -> Array:
    """With the argument `value`."""
    return _SCALAR[part.op](in_accumulator(x), part.args.get("value", 1))


_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "pow": "power",
    "mod": "mod",
    "maximum": "maximum",
    "minimum": "minimum",
    "complex_mul": "multiply",
}
_COMPARE = (
    "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or",
    "logical_xor",
)  # fmt: skip


@kernel(*_BINARY)
def binary(part: Part, x: Array, y: Array) -> Array:
    """NumPy's ufunc in the accumulator's type; integers divide to the nearest below."""
    name = _BINARY[part.op]
    if name == "divide" and x.dtype.kind in "iub":
        name = "floor_divide"
    wide = dtypes.get(x.dtype).accumulator
    return getattr(part.xp, name)(*(converted(part.xp, operand, wide) for operand in (x, y)))


@kernel(*_COMPARE)
def compare(part: Part, x: Array, y: Array) -> Array:
    """NumPy's ufunc of the same name."""
    return getattr(part.xp, part.op)(x, y)


@kernel("where")
def where(part: Part, condition: Array, x: Array, y: Array) -> Array:
    """x where the condition is true, else y."""
    return part.xp.where(condition.astype(bool), x, converted(part.xp, y, dtypes.get(x.dtype)))


@kernel("rebind")
def rebind(part: Part, *arrays: Array) -> tuple[Array, ...]:
    """The operands as they are."""
    return arrays


@kernel("buffer_store")
def buffer_store(part: Part, destination: Array, source: Array) -> Array:
    """The source, in the destination's dtype."""
    return source.copy()
