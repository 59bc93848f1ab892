"""What an optimizer sees: this rank's part of a unit, 1-D; and two optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowshard.argument import brief, instance, items
from lowshard.errors import BufferMismatchError, KernelError
from lowshard.fsdp.flat_plan import Piece
from lowshard.kernels import adamw_step, sgd_step

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Rule = Callable[["Slot"], None]


class SlotState(dict[str, Any]):
    """Optimizer state of a slot by name; an array that is asked for first is zeros like the parameters."""

    def __init__(self, like: Array, xp: Any) -> None:
        super().__init__()
        self._like, self._xp = like, xp

    def __missing__(self, key: str) -> Array:
        made = self[key] = self._xp.zeros_like(self._like)
        return made


class Slot:
    """This rank's part of one unit's trainable parameters.

    Padding between pieces is zero in `grad`, and must be zero in `param` when a rule is done.

    Attributes:
        unit: the unit's name.
        pieces: the elements of parameters it holds, and their positions.
        state: of the optimizer: arrays like `param` (saved in pieces), or numbers.
        step: how often it was updated, this time included.
    """

    def __init__(self, unit: str, param: Array, grad: Array, pieces: Sequence[Piece], xp: Any) -> None:
        rule = "a slot's pieces are a sequence of Piece values"
        self.unit, self.pieces, self.step = unit, items(pieces, rule, KernelError), 0
        self._param, self._grad = param, grad
        self.state = SlotState(param, xp)

    @property
    def param(self) -> Array:
        """The parameters in the master dtype `[elems]`; assigning writes into them."""
        return self._param

    @param.setter
    def param(self, value: Array) -> None:
        if value is not self._param:
            self._param[...] = value

    @property
    def grad(self) -> Array:
        """The reduced gradient in the master dtype `[elems]`; assigning writes into it."""
        return self._grad

    @grad.setter
    def grad(self, value: Array) -> None:
        if value is not self._grad:
            self._grad[...] = value

    def spans(self, key: Callable[[str], Any]) -> Iterator[tuple[int, int, Any]]:
        """Split the slot into intervals whose parameters have one value of `key(name)`: (first, stop, value).

        Names are full, "l0.w". Padding goes with what is before it.
        """
        first, value = 0, None
        for index, piece in enumerate(self.pieces):
            found = key(f"{self.unit}.{piece.name}")
            if index and found != value:
                yield first, piece.shard_lo, value
                first = piece.shard_lo
            value = found
        if self.pieces:
            yield first, self._param.size, value


class AdamW:
    """AdamW with decoupled decay, in one pass; see `lowshard.kernels.adamw_step` for the formula. Masters are float32.

    One object serves all steps and all slots: what it keeps lies in the slots.

    Args:
        lr: learning rate; may be set anew before each step.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: decay, times lr.
        decay: says by a parameter's full name whether decay falls on it; None: on all.

    Raises:
        KernelError: a setting that is not a number, or out of its range.
    """

    def __init__(
        self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        decay: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise KernelError(f"AdamW: betas are two numbers, got {betas!r}")
        _need_numbers(
            "AdamW", decay, lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1]
        )
        self.lr, self.betas, self.eps, self.weight_decay, self.decay = lr, betas, eps, weight_decay, decay

    def __call__(self, slot: Slot) -> None:
        """Update one slot.

        Raises:
            BufferMismatchError: the master dtype is not float32.
        """
        _need_float32(slot, "AdamW")
        first, second = slot.state["m"], slot.state["v"]
        for lo, hi, decays in slot.spans(self.decay or _always):
            adamw_step(
                slot.param[lo:hi], slot.grad[lo:hi], first[lo:hi], second[lo:hi], lr=self.lr, beta1=self.betas[0],
                beta2=self.betas[1], eps=self.eps, weight_decay=self.weight_decay if decays else 0.0, step=slot.step,
            )  # fmt: skip


class SGD:
    """SGD with momentum, in one pass; see `lowshard.kernels.sgd_step` for the formula. Masters are float32.

    Args:
        lr: learning rate; may be set anew before each step.
        momentum: of the buffer; 0 keeps none.
        weight_decay: times the parameters, added to the gradient.
        decay: as for `AdamW`.

    Raises:
        KernelError: as for `AdamW`.
    """

    def __init__(
        self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, decay: Callable[[str], bool] | None = None
    ) -> None:  # fmt: skip
        _need_numbers("SGD", decay, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.lr, self.momentum, self.weight_decay, self.decay = lr, momentum, weight_decay, decay

    def __call__(self, slot: Slot) -> None:
        """Update one slot.

        Raises:
            BufferMismatchError: the master dtype is not float32.
        """
        _need_float32(slot, "SGD")
        first = "momentum" not in slot.state
        buffer = slot.state["momentum"] if self.momentum else None
        for lo, hi, decays in slot.spans(self.decay or _always):
            sgd_step(
                slot.param[lo:hi], slot.grad[lo:hi], None if buffer is None else buffer[lo:hi], lr=self.lr,
                momentum=self.momentum, weight_decay=self.weight_decay if decays else 0.0, first=first,
            )  # fmt: skip


def _always(name: str) -> bool:
    return True


def _need_numbers(rule: str, decay: object, **values: object) -> None:
    for name, value in values.items():
        below = 1.0 if name.startswith("beta") else math.inf
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or not 0 <= value < below:  # type: ignore[operator]
            span = "of 0 or more" if below == math.inf else f"from 0 to below {below:g}"
            raise KernelError(f"{rule}: {name} is a number {span}, got {brief(value)}")
    if decay is not None and not callable(decay):
        raise KernelError(f"{rule}: decay is a function of a parameter's name, or None, got {brief(decay)}")


def _need_float32(slot: Slot, name: str) -> None:
    instance(slot, Slot, f"{name} updates a Slot", KernelError)
    if slot.param.dtype.name != "float32":
        raise BufferMismatchError(
            f"{name} updates float32, got a master of {slot.param.dtype.name}; leave Precision.master at float32, or "
            "pass update() a function of a slot"
        )
