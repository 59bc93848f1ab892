"""Checks of the layouts and arrays given to a Publisher or Subscriber."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowshard import dtypes
from lowshard.argument import brief, is_text, mapping
from lowshard.errors import BufferMismatchError, PlanError
from lowshard.foreign_array import READ_ONLY, require_native
from lowshard.kernels.buffer import is_gpu, require_array
from lowshard.reshard.tensor_layout import TensorLayout, as_tensor_layout

Array = Any


def same_again(version: object) -> PlanError:
    """Return the error for a second version of immutable arrays."""
    return PlanError(
        f"all arrays that this rank gives are JAX's, which never change, so version {brief(version)} would be the last "
        "one again; give NumPy's arrays as buffers, buffer = numpy.array(x), and before each version write "
        "numpy.copyto(buffer, x)"
    )


def tensor_layouts(given: object, size: int) -> dict[str, TensorLayout]:
    """Return layouts by name, each within the job's ranks."""
    found = {}
    rule = "layouts are a mapping of names to layouts"
    for name, layout in mapping(given, rule, PlanError).items():
        if not isinstance(name, str) or not is_text(name):
            raise PlanError(f"{rule}; a name is text that UTF-8 can write, got {brief(name)}")
        found[name] = as_tensor_layout(layout)
        if found[name].rank_map.span[1] > size:
            raise PlanError(
                f"{name}: {found[name]} names ranks that this communicator of {size} does not have"
            )
    if not found:
        raise PlanError("layouts name one tensor or more, got none")
    return found


def local_arrays(
    layouts: Mapping[str, TensorLayout], given: object, rank: int, writes: bool = False
) -> dict[str, Array]:
    """Return this rank's arrays by name, checked against their layouts."""
    arrays = dict(mapping(given, "arrays are a mapping of names to this rank's arrays", PlanError))
    found = {}
    for name, layout in layouts.items():
        shape = layout.local_shape(rank)
        if shape is None:
            if arrays.pop(name, None) is not None:
                raise BufferMismatchError(
                    f"{name}: rank {rank} holds no part of {layout}; leave its array out"
                )
            continue
        if name not in arrays:
            raise PlanError(f"{name}: rank {rank} holds a part of {layout}, but has no array of that name")
        array = array_of(layout, shape, arrays.pop(name), rank, name)
        if writes and not is_gpu(array) and not array.flags.writeable:
            raise BufferMismatchError(f"{name} {READ_ONLY}")
        found[name] = array
    if arrays:
        raise PlanError(f"arrays without a layout: {', '.join(sorted(map(str, arrays)))}")
    return found


def array_of(layout: TensorLayout, shape: tuple[int, ...], given: object, rank: int, name: str) -> Array:
    """Return a rank's array of a tensor, checked against local shape and dtype."""
    array, dtype = require_array(given, name), dtypes.get(layout.dtype)
    require_native(array, name)
    is_other = array.dtype.itemsize != dtype.itemsize_bytes if is_gpu(array) else array.dtype != dtype.numpy
    if array.shape != shape or is_other:
        raise BufferMismatchError(
            f"{name}: rank {rank} of {layout} holds {dtype.name}{list(shape)}, got {array.dtype}{list(array.shape)}"
        )
    return array
