"""The interface of a transform of tensors on their way.

The first four methods are those of Megatron-LM d98e8a64 (`megatron/core/resharding/transforms.py`). The others have
defaults: tensors may be split anywhere, replicas are quantised once, and an aborted reshard leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import truth
from lowshard.box import Box, shape_of
from lowshard.errors import DTypeError, KernelError, PlanError
from lowshard.foreign_array import view_of
from lowshard.kernels import cast
from lowshard.kernels.buffer import is_gpu
from lowshard.kernels.mxfp8 import FLOATS

Array = Any
Slices = tuple[slice, ...]


class ReshardTransform:
    """Converts tensors between their source and destination arrays; by default none.

    A subclass says which tensors it converts and which arrays are sent for them: as many, of as many bytes each, as the
    other side has buffers for. Both sides are compared before a byte moves. The arrays that it returns may be of any
    library; those that it is given are NumPy's or CuPy's, over the memory of what users and `prepare_recv` gave.
    """

    def should_transform(self, param_name: str) -> bool:
        """Return whether a tensor is converted; the methods below are called for such tensors only."""
        return False

    def prepare_send(self, param_name: str, src_slice: Slices, src_param: Array) -> list[Array]:
        """Return the arrays to send for a slice of a source tensor, contiguous."""
        raise NotImplementedError(f"{type(self).__name__} sends nothing: it has no prepare_send")

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[Array]:
        """Return contiguous receive buffers for a slice of a destination tensor."""
        raise NotImplementedError(f"{type(self).__name__} receives nothing: it has no prepare_recv")

    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[Array]) -> None:
        """Store what was received."""
        raise NotImplementedError(f"{type(self).__name__} receives nothing: it has no finalize_recv")

    # ---- beyond Megatron's contract

    def begin(self) -> None:
        """A reshard begins: drop what an earlier one may have left."""

    def end(self) -> None:
        """A reshard has moved everything; raise if something is missing."""

    def send_format(
        self, param_name: str, src_box: Box, dtype: str
    ) -> list[tuple[str, tuple[int, ...]]] | None:
        """Return dtype and shape of the arrays of `prepare_send`, or None: call it to know."""
        return None

    def recv_format(
        self, param_name: str, dst_box: Box, dtype: str
    ) -> list[tuple[str, tuple[int, ...]]] | None:
        """Return dtype and shape of the arrays of `prepare_recv`, or None: call it to know."""
        return None

    def travels_plain(self, param_name: str, dst_box: Box) -> bool:
        """Return whether a box must be sent unconverted; asked on both sides."""
        return False

    def check_refuses(self, param_name: str, dst_box: Box) -> str | None:
        """Return why a box cannot be received, or None; asked on both sides before anything moves."""
        return None

    in_place = False
    """Whether the next two methods are there. They take the place of the three above wherever a box, or some of it,
    lies whole in a bucket: nothing is copied before it is converted, or after."""

    def send_rows(self, param_name: str, src_slice: Slices, src_param: Array, out: list[Array]) -> None:
        """Write what `prepare_send` would return for a slice, some rows of a box, into arrays of its form."""
        raise NotImplementedError(f"{type(self).__name__} has no send_rows")

    def recv_rows(self, param_name: str, dst_slice: Slices, came: list[Array]) -> None:
        """Store what was sent for a slice, or the values themselves (one array) of a source of this rank.

        The arrays are only valid during the call, and may have any strides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no recv_rows")

    def change_block_elems(self, param_name: str, dst_box: Box) -> int:
        """Return the elements along the last dim that can be converted separately; 0: only whole boxes.

        If it is not 0 the four methods below exist, and a refit with `delta` sends only changed blocks.
        """
        return 0

    def change_block_bytes(self, param_name: str, dtype: str) -> int:
        """Return the bytes sent for a block of a tensor of a dtype."""
        raise NotImplementedError(f"{type(self).__name__} takes no blocks")

    def make_blocks(self, param_name: str, blocks: Array) -> Array:
        """Return what to send for blocks [blocks, elements], uint8 [blocks, bytes], contiguous."""
        raise NotImplementedError(f"{type(self).__name__} makes no blocks")

    def store_blocks(self, param_name: str, dtype: str, index: tuple[Array, ...], came: Array) -> None:
        """Store what was sent for blocks of a tensor of a dtype, uint8 [blocks, bytes].

        `index` has their positions in the destination tensor, int64 [blocks] a dim; that of the last dim counts blocks.
        Those of the version before may come ahead of `begin`.
        """
        raise NotImplementedError(f"{type(self).__name__} stores no blocks")

    def take_over(self, param_name: str, dst_slice: Slices, other: Any) -> None:
        """Store what `other`, a twin of this transform, holds for a slice of a destination tensor."""
        raise NotImplementedError(f"{type(self).__name__} takes nothing over")

    def refit_weights(self) -> Mapping[str, Any]:
        """Return the stored tensors by name, for `Refit.weights`."""
        return {}

    def twin(self) -> ReshardTransform:
        """Return a transform like this one with buffers of its own, for a second version.

        Raises:
            PlanError: this kind of transform has none.
        """
        raise PlanError(
            f"{type(self).__name__} has no twin() with buffers of its own; write one, or refit with "
            "buffering='in_place'"
        )


class CastTransform(ReshardTransform):
    """Casts float tensors to another float dtype on the way, rounded once: fp32 masters into bf16 weights, say.

    Every rank passes it. Destinations are the arrays that are given, of `dtype`; the plan's layouts say what each side
    holds, and a tensor that has one dtype on both sides stays as it is. The bits are those of `lowshard.kernels.cast`.
    A `Subscriber` casts what it receives, which a `Publisher` sends as it is.

    Args:
        dtype: "bfloat16", "float16" or "float32".
        convert_on_send: cast before sending; False sends what the sources hold, and the receiver casts. With `delta` a
            `Refit` compares and sends elements that were cast; what the receiver casts goes whole.

    Raises:
        DTypeError: dtype is none of the three.
        KernelError: convert_on_send is not True or False.
    """

    in_place = True

    def __init__(self, dtype: object, convert_on_send: bool = True) -> None:
        self.dtype = dtypes.get(dtype).name
        if self.dtype not in FLOATS:
            raise DTypeError(f"CastTransform gives {', '.join(FLOATS)}, got dtype {self.dtype}")
        self.convert_on_send = truth(convert_on_send, "convert_on_send is True or False", KernelError)
        self._into: Mapping[str, Array] = {}

    def twin(self) -> CastTransform:
        """Return a transform like this one."""
        return CastTransform(self.dtype, self.convert_on_send)

    def into(self, arrays: Mapping[str, Array]) -> CastTransform:
        """Return a transform like this one that stores in arrays, by name."""
        made = self.twin()
        made._into = arrays
        return made

    def prepare_send(self, param_name: str, src_slice: Slices, src_param: Array) -> list[Array]:
        """Return the slice, cast."""
        return [cast(src_param[(*src_slice, ...)], self.dtype)]

    def send_rows(self, param_name: str, src_slice: Slices, src_param: Array, out: list[Array]) -> None:
        """Cast a slice into an array."""
        cast(src_param[(*src_slice, ...)], self.dtype, out[0])

    def recv_format(self, param_name: str, dst_box: Box, dtype: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return the dtype that is sent, and the box's shape."""
        return [(dtype, shape_of(dst_box))]

    def send_format(self, param_name: str, src_box: Box, dtype: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return the dtype that is sent, and the box's shape."""
        return [(dtype, shape_of(src_box))]

    def recv_rows(self, param_name: str, dst_slice: Slices, came: list[Array]) -> None:
        """Cast what came into the destination."""
        cast(came[0], self.dtype, self._into[param_name][(*dst_slice, ...)])


def memory_of(transform: ReshardTransform | None) -> list[tuple[str, Array]]:
    """Return the arrays that a transform stores tensors in, with the tensors' names."""
    held = {} if transform is None else transform.refit_weights()
    return [(name, array) for name, one in held.items() for array in arrays_of(one)]


def arrays_of(held: Any) -> list[Array]:
    """Return the arrays of what stores a tensor: those of data and scale, or the one that it is."""
    parts = (held.data, held.scale) if hasattr(held, "scale") else (held,)
    found = [view_of(part, "what stores a tensor") for part in parts]
    return [array for array in found if isinstance(array, np.ndarray) or is_gpu(array)]
