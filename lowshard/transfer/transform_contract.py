"""The interface of a transform of tensors on their way.

The first four methods are those of Megatron-LM d98e8a64 (`megatron/core/resharding/transforms.py`). The others have
defaults: tensors may be split anywhere, replicas are quantised once, and an aborted reshard leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowshard.box import Box
from lowshard.errors import PlanError
from lowshard.foreign_array import view_of
from lowshard.kernels.buffer import is_gpu

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


def memory_of(transform: ReshardTransform | None) -> list[tuple[str, Array]]:
    """Return the arrays that a transform stores tensors in, with the tensors' names."""
    held = {} if transform is None else transform.refit_weights()
    return [(name, array) for name, one in held.items() for array in arrays_of(one)]


def arrays_of(held: Any) -> list[Array]:
    """Return the arrays of what stores a tensor: those of data and scale, or the one that it is."""
    parts = (held.data, held.scale) if hasattr(held, "scale") else (held,)
    found = [view_of(part, "what stores a tensor") for part in parts]
    return [array for array in found if isinstance(array, np.ndarray) or is_gpu(array)]
