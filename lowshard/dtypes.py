"""One dtype table: what lowshard, NumPy, safetensors, NCCL and CuPy call each element type.

Sources: safetensors names, the format's `Dtype` list (safetensors 0.8); NCCL codes, `ncclDataType_t`
in nccl.h 2.30 (None: NCCL has no such type, the bytes travel as uint8); fp8 and e8m0, OCP
Microscaling Formats v1.0 section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from lowshard.argument import brief, quoted
from lowshard.errors import DependencyError, DTypeError

Kind = Literal["float", "int", "uint", "bool", "scale", "opaque"]


@dataclass(frozen=True)
class DType:
    """One element type. Compares by value; `str()` is its canonical name."""

    name: str
    """Canonical name, which is NumPy's (or ml_dtypes') own."""
    short: str
    """Short alias, as used in tables and accepted wherever a dtype is."""
    kind: Kind
    bits: int
    safetensors: str
    """The name in a safetensors header."""
    nccl: int | None
    """`ncclDataType_t` for reductions, or None."""
    in_numpy: bool
    """True: a plain NumPy dtype. False: registered by ml_dtypes."""

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; loads ml_dtypes on first use for bf16, fp8 and e8m0."""
        return _numpy_dtype(self)

    def in_memory(self, xp: Any) -> np.dtype[Any]:
        """Return the dtype of its buffers in an array module: fp8 and e8m0 are uint8 in CuPy, which has neither."""
        raw = xp is not np and self.bits == 8 and self.kind in ("float", "scale")
        return np.dtype(np.uint8) if raw else self.numpy

    @property
    def is_float8(self) -> bool:
        """True for the 8-bit float element types (not for e8m0, which is a scale)."""
        return self.kind == "float" and self.bits == 8

    @property
    def accumulator(self) -> DType:
        """The type sums run in before they are rounded once: float32 for floats below 32 bits."""
        return get("float32") if self.kind == "float" and self.bits < 32 else self

    def __str__(self) -> str:
        return self.name


_ROWS = (
    DType("float64", "f64", "float", 64, "F64", 8, True),
    DType("float32", "f32", "float", 32, "F32", 7, True),
    DType("float16", "f16", "float", 16, "F16", 6, True),
    DType("bfloat16", "bf16", "float", 16, "BF16", 9, False),
    DType("float8_e4m3fn", "e4m3", "float", 8, "F8_E4M3", None, False),
    DType("float8_e5m2", "e5m2", "float", 8, "F8_E5M2", None, False),
    DType("float8_e8m0fnu", "e8m0", "scale", 8, "F8_E8M0", None, False),
    DType("int8", "i8", "int", 8, "I8", 0, True),
    DType("int16", "i16", "int", 16, "I16", None, True),
    DType("int32", "i32", "int", 32, "I32", 2, True),
    DType("int64", "i64", "int", 64, "I64", 4, True),
    DType("uint8", "u8", "uint", 8, "U8", 1, True),
    DType("uint16", "u16", "uint", 16, "U16", None, True),
    DType("uint32", "u32", "uint", 32, "U32", 3, True),
    DType("uint64", "u64", "uint", 64, "U64", 5, True),
    DType("bool", "bool", "bool", 8, "BOOL", None, True),
)

_OPAQUE = tuple(
    DType(f"opaque {name}", "", "opaque", 64 if name == "C64" else 8, name, None, True)
    for name in ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
)
"""What safetensors has beside these: stored and sharded as unsigned integers of so many bits, never computed with."""

_ALIASES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "float8_e8m0": "float8_e8m0fnu",
    "bool_": "bool",
}  # fmt: skip

_BY_NAME: dict[str, DType] = {row.name: row for row in _OPAQUE}
for _row in _ROWS:
    for _name in (_row.name, _row.short, _row.safetensors):
        _BY_NAME[_name] = _row
for _name, _target in _ALIASES.items():
    _BY_NAME[_name] = _BY_NAME[_target]


def all_dtypes() -> tuple[DType, ...]:
    """Every element type lowshard computes with, widest float first."""
    return _ROWS


def get(dtype: object) -> DType:
    """Return the table row of a dtype given as a name, an alias, a row, or a dtype of NumPy, torch, JAX or the like."""
    if isinstance(dtype, DType):
        return dtype
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    row = _BY_NAME.get(name.partition("[")[0] if name.startswith("opaque ") else name)
    if row is not None and row.kind == "opaque":
        return replace(row, name=name)
    # Other names are for people: ml_dtypes' own float8_e4m3 has infinities, and is not float8_e4m3fn.
    if row is None or (name != row.name and not isinstance(dtype, str)):
        known, code = ", ".join(r.name for r in _ROWS), _name_of_code(dtype)
        advice = "what is moved and not computed with goes as its bytes, a view of uint8"
        if code:
            advice = f"for NumPy's code {brief(dtype)} write {code!r}"
        raise DTypeError(f"dtype {brief(dtype)} is not one that lowshard carries; it knows {known}; {advice}")
    return row


def from_safetensors(name: object) -> DType:
    """Return the row that a safetensors header names, or raise DTypeError."""
    known = {row.safetensors: row for row in (*_ROWS, *_OPAQUE)}
    if not isinstance(name, str) or name not in known:
        raise DTypeError(f"unknown dtype {quoted(name)}; lowshard reads {', '.join(known)}")
    return known[name]


def _name_of_code(dtype: object) -> str:
    """Return the name that a type code of NumPy such as f4 stands for, or nothing."""
    try:
        name = np.dtype(dtype).name if isinstance(dtype, str) and len(dtype) < 4 else ""
    except Exception:  # NumPy raises what it likes of what is no code
        return ""
    return name if name in _BY_NAME else ""


def _name_of(dtype: object) -> str:
    # ml_dtypes gives its types unstable type characters, so only the name identifies them.
    if dtype is None:  # NumPy reads None as float64
        return "None"
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload,no-any-return]
    except Exception:  # NumPy raises what it likes of what is not a dtype
        # Dtypes of other libraries read as torch.bfloat16 does.
        return brief(dtype).rpartition(".")[2]


@cache
def _numpy_dtype(row: DType) -> np.dtype[Any]:
    if row.in_numpy:
        return np.dtype(f"u{row.itemsize_bytes}" if row.kind == "opaque" else row.name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DependencyError(
            f"dtype {row.name} needs ml_dtypes, a core dependency: pip install 'ml-dtypes>=0.5.1'"
        ) from error
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.name))
    return found
