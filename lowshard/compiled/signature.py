"""What a compiled function takes and returns, in words that need no Numba."""

from __future__ import annotations

from dataclasses import dataclass

INT = "int64"


@dataclass(frozen=True)
class Signature:
    """What a compiled function takes and returns.

    Attributes:
        args: of each argument its kind: "int64", "bool", or a C-contiguous array such as "float32[1]" of one dim.
        result: "int64", "uint64" or "void".
    """

    args: tuple[str, ...]
    result: str = INT
