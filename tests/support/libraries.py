"""Arrays of NumPy, torch and JAX of the same bits, made and read without lowshard."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = Any

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "int16",
    "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
"""What torch and JAX have both."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def given(library: str, values: np.ndarray) -> Array:
    """Return an array of a library with the bits of a NumPy array, in memory of its own."""
    if library == "numpy":
        return values.copy()
    if library == "torch":
        import torch

        raw = torch.tensor(list(values.tobytes()), dtype=torch.uint8)
        return raw.view(getattr(torch, values.dtype.name)).reshape(values.shape)
    import jax

    return jax.device_put(values.copy(), may_alias=False)


def dtype_of(library: str, name: str) -> Any:
    """Return a dtype as a library calls it."""
    if library == "torch":
        import torch

        return getattr(torch, name)
    if library == "jax":
        import jax.numpy as jnp

        return getattr(jnp, name)
    return numpy_dtype(name)


def bits(array: Array) -> tuple[tuple[int, ...], str, bytes]:
    """Return shape, dtype and bits of an array of any of the three."""
    if library_of(array) == "torch":
        import torch

        shape, name = tuple(array.shape), str(array.dtype).removeprefix("torch.")
        flat = array.contiguous().reshape(-1).view(torch.uint8) if array.numel() else array
        return shape, name, bytes(flat.tolist()) if array.numel() else b""
    found = np.asarray(array)
    return found.shape, found.dtype.name, found.tobytes()


def address(array: Array) -> int:
    """Return where an array's first element lies."""
    if library_of(array) == "torch":
        return int(array.data_ptr())
    return int(array.unsafe_buffer_pointer() if library_of(array) == "jax" else array.ctypes.data)


def library_of(array: Array) -> str:
    """Return which of the three an array is of."""
    root = type(array).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def random_values(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return values that are exact in every dtype, small enough for the sums of a few ranks to be so, too."""
    dtype = numpy_dtype(name)
    least = 0 if name == "bool" or name.startswith("u") or name.endswith("fnu") else -2
    values = rng.integers(least, 3 if name != "bool" else 2, shape)
    return (2.0**values if name == "float8_e8m0fnu" else values).astype(dtype)
