"""Weight: a named array with its strategy, storage, scales and bias; `shard` gives every device its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lowshard.argument import brief, instance, items, whole
from lowshard.box import Box, full_box, shape_of
from lowshard.errors import ShardIndexError, ShardingError
from lowshard.foreign_array import view_of
from lowshard.tiling import Tiling
from lowshard.weights.quantization import Quantization
from lowshard.weights.shard_rules import Rule, join
from lowshard.weights.sharding_strategy import ShardingStrategy

Array = Any  # a NumPy or CuPy array


class Weight:
    """A weight, whole or one device's part of it.

    Args:
        name: its name; the part of device i is called `name[i]`.
        array: the stored elements, `[out, in]` for a matrix.
        sharding_strategy: how it is cut.
        quantization: how values are stored and scaled; None for plain values.
        scale: the scales, of `quantization.scale_shape(shape)` (rows: also without the last axis).
        input_scale: a scalar that every device keeps.
        bias: of the weight's shape without the last axis.

    Raises:
        ShardingError: an argument of another type, scales without a quantisation, or scales or bias of another shape.
    """

    def __init__(
        self,
        name: str,
        array: Array,
        sharding_strategy: ShardingStrategy | None = None,
        *,
        quantization: Quantization | None = None,
        scale: Array | None = None,
        input_scale: Array | None = None,
        bias: Array | None = None,
    ) -> None:
        instance(name, str, "the name of a weight is text", ShardingError)
        for what, value, kind in (
            ("sharding_strategy", sharding_strategy, ShardingStrategy), ("quantization", quantization, Quantization),
        ):  # fmt: skip
            if value is not None:
                instance(value, kind, f"{what} is a {kind.__name__} or None", ShardingError)
        for what, value in (("scale", scale), ("bias", bias)):
            if value is not None and not hasattr(value, "shape"):
                raise ShardingError(f"{what} of {brief(name)} is an array or None, got {brief(value)}")
        self.name, self.quantization = name, quantization
        if isinstance(array, np.ndarray):
            view_of(array, name)
        self._make: Callable[[], Array] | None = None
        self._array: Array | None = array if hasattr(array, "shape") else _as_array(array, name)
        self.shape: tuple[int, ...] = tuple(self._array.shape)
        self.dtype = self._array.dtype
        self._strategy = sharding_strategy
        self.scale, self.input_scale, self.bias = scale, input_scale, bias
        self.index: int | None = None
        """The device's number, for a part."""
        self.device: Any = None
        self._check_companions()

    # ---- what it is

    @property
    def array(self) -> Array:
        """The stored elements; a part is sliced out when it is first asked for."""
        if self._array is None:
            assert self._make is not None
            self._array, self._make = self._make(), None
        return self._array

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How the weight is sharded; None on a part."""
        return self._strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy | None) -> None:
        if self.index is not None:
            raise ShardingError(
                f"{self.name} is one device's part and is not cut again: cut the whole weight"
            )
        if strategy is not None:
            instance(
                strategy, ShardingStrategy, "sharding_strategy is a ShardingStrategy or None", ShardingError
            )
        self._strategy = strategy

    @property
    def is_shard(self) -> bool:
        """True for one device's part."""
        return self.index is not None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Array:
        return self.array[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.array)
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        return f"<Weight {self.name}: {self.dtype}{list(self.shape)}, {self._strategy or 'no strategy'}>"

    # ---- cutting it

    def shard(self, devices: int | Iterable[Any] | None = None) -> list[Weight]:
        """Return each device's part: stored elements, scales and bias, cut lazily.

        The bias is added once, however the weight is sharded: it is sharded with the output axis, given to every device
        of a replicated weight, and to device 0 alone where the input axis is sharded, since the devices' products
        are then summed.

        Args:
            devices: as many as the strategy is for (anything that names them), or their number; None takes the
                strategy's.

        Raises:
            ShardingError: no strategy, a part, another number of devices, a strategy that does not fit the
                stored shape, a split through a block or a packed element.
            MarkerError: a module's marker.
        """
        strategy = self._strategy
        if self.index is not None:
            raise ShardingError(f"{self.name} is one device's part already: shard the whole weight")
        if strategy is None:
            raise ShardingError(
                f"{self.name} has no sharding strategy: pass sharding_strategy=ShardingStrategy.rowwise(n), say"
            )
        names: Sequence[Any] = range(strategy.num_devices)
        rule = "devices are a number, or a sequence of what names them"
        if isinstance(devices, Iterable):
            names = items(devices, rule, ShardingError)
        count = (
            len(names)
            if devices is None or isinstance(devices, Iterable)
            else whole(devices, rule, ShardingError)
        )
        if count != strategy.num_devices:
            raise ShardingError(
                f"{self.name}: {strategy} cuts into {strategy.num_devices} parts, {count} devices were given"
            )
        if isinstance(strategy.shard, Rule):
            self._tiling(strategy)  # raises unless every element gets a device
        return [self._part(strategy, index, device) for index, device in enumerate(names)]

    def layout(self) -> Tiling:
        """Return which stored boxes each device holds; checked as `shard` does.

        Raises:
            LowshardError: as `shard`.
        """
        if self._strategy is None:
            raise ShardingError(f"{self.name} has no sharding strategy, so no layout")
        return self._tiling(self._strategy)

    def part(self, strategy: ShardingStrategy, index: int) -> Array:
        """Return the stored elements that a strategy gives device `index`.

        Raises:
            ShardingError: the strategy would split a block or a packed element.
            LowshardError: as `ShardingStrategy.pieces`.
        """
        instance(strategy, ShardingStrategy, "a weight is cut by a ShardingStrategy", ShardingError)
        most = strategy.num_devices - 1
        index = whole(index, f"an index is 0 to {most}", ShardIndexError, 0, most)
        if self.quantization is None or not isinstance(strategy.shard, Rule):
            return strategy.shard(self, index, strategy.num_devices)
        return join(self.array, self.quantization.pieces(strategy, self.shape, index), strategy.concat_axis)

    def _pieces(self, strategy: ShardingStrategy, index: int) -> list[Box]:
        if self.quantization is None:
            return strategy.pieces(self.shape, index)
        return self.quantization.pieces(strategy, self.shape, index)

    def _tiling(self, strategy: ShardingStrategy) -> Tiling:
        pieces = [self._pieces(strategy, i) for i in range(strategy.num_devices)]
        return strategy.tiling_of(pieces, self.shape, self.dtype)

    def _part(self, strategy: ShardingStrategy, index: int, device: Any) -> Weight:
        part = Weight.__new__(Weight)
        part.name, part.index, part.device = f"{self.name}[{index}]", index, device
        part.quantization, part._strategy = self.quantization, None
        part.dtype, part.input_scale = self.dtype, self.input_scale
        part._array, part._make, part.scale, part.bias = None, None, None, None
        if not isinstance(strategy.shard, Rule):  # the user's own function
            self._refuse_companions()
            part._array = strategy(self.array, index)
            part.shape = tuple(part._array.shape)
            return part
        boxes = self._pieces(strategy, index)
        axis = strategy.concat_axis
        part._make = lambda: join(self.array, boxes, axis)
        part.shape = _joined_shape(boxes, axis)
        part.scale = self._scale_part(boxes, axis)
        part.bias = self._bias_part(strategy, boxes, axis, index)
        return part

    def _scale_part(self, boxes: list[Box], axis: int) -> Array | None:
        if self.scale is None:
            return None
        assert self.quantization is not None  # checked at construction
        shape = self.quantization.scale_shape(self.shape)
        if shape == ():
            return self.scale
        cut = [self.quantization.scale_box(box, self.shape) for box in boxes]
        last = len(self.shape) - 1
        if self.quantization.blocks(len(self.shape))[axis % len(self.shape)] is None:
            cut = cut[:1]  # the cut axis shares its scales
        joined = join(self.scale.reshape(shape), cut, axis)
        return joined if len(self.scale.shape) == len(shape) else joined.reshape(joined.shape[:last])

    def _bias_part(self, strategy: ShardingStrategy, boxes: list[Box], axis: int, index: int) -> Array | None:
        if self.bias is None:
            return None
        cut, last = strategy.sharded_axis, len(self.shape) - 1
        # The axis first: a part of a matrix without columns is the whole of it, on every device.
        if cut is not None and cut % len(self.shape) == last:
            return self.bias if index == 0 else None
        if boxes == [full_box(self.shape)]:
            return self.bias
        if last == 0:  # nothing of a vector, whose bias is one number
            return None
        return join(self.bias, [box[:-1] for box in boxes], axis % len(self.shape))

    def _check_companions(self) -> None:
        if self.bias is not None and tuple(self.bias.shape) != self.shape[:-1]:
            raise ShardingError(
                f"{self.name}: a bias has the weight's shape without the last axis, {self.shape[:-1]}, got "
                f"{tuple(self.bias.shape)}"
            )
        if self.quantization is not None:
            self.quantization.value_shape(self.shape)
        if self.scale is None:
            return
        if self.quantization is None or self.quantization.granularity == "none":
            raise ShardingError(
                f"{self.name} has scales but nothing says what they belong to: pass quantization="
                "Quantization.scaled('tensor' | 'row' | 'block', block), or mxfp8()"
            )
        expected, got = self.quantization.scale_shape(self.shape), tuple(self.scale.shape)
        fine = {expected, expected[:-1]} if self.quantization.granularity == "row" else {expected}
        if got not in fine and not (expected == () and got == (1,)):
            raise ShardingError(
                f"{self.name}: {self.quantization.name} of shape {self.shape} has scales of shape {expected}, got {got}"
            )

    def _refuse_companions(self) -> None:
        if self.bias is not None or self.scale is not None:
            raise ShardingError(
                f"{self.name}: a function of your own says nothing of bias and scales: cut them as weights"
            )


def _as_array(value: object, name: str) -> Array:
    """Return numbers in lists as an array, or raise ShardingError."""
    try:
        found = np.asarray(value)
    except (OverflowError, TypeError, ValueError):  # lists of several lengths
        found = None
    if found is None or found.dtype.kind in "OSU":
        raise ShardingError(f"weight {brief(name)} is an array of numbers, got {brief(value)}")
    return found


def _joined_shape(boxes: list[Box], axis: int) -> tuple[int, ...]:
    first = list(shape_of(boxes[0]))
    if first:
        first[axis] = sum(box[axis][1] - box[axis][0] for box in boxes)
    return tuple(first)
