"""One pass of an optimizer over flat arrays: AdamW and SGD, the same bits on every engine."""

from __future__ import annotations

import math

from lowshard.argument import number, truth, whole
from lowshard.errors import BufferMismatchError, KernelError
from lowshard.foreign_array import require_native
from lowshard.kernels.buffer import Array, address, dtype_name, is_gpu, require_apart, require_array
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream

_MOST_STEPS = 1 << 53
"""Whole numbers up to here are floats."""


@takes_stream
def adamw_step(
    param: Array, grad: Array, first: Array, second: Array, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int, stream: Stream = None,
) -> None:  # fmt: skip
    """Update parameters and both moments in place by AdamW with decoupled decay.

    In float32, each operation rounded once: p = p * (1 - lr * decay); m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * (g * g); p = p - (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps)).
    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with a learning rate in front of the decay, as PyTorch has it.

    Args:
        param: float32 [n], contiguous.
        grad: the same, left as it is.
        first: first moment m, the same.
        second: second moment v, the same.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second.
        eps: added to the root.
        weight_decay: decay, times lr.
        step: t, 1 for the first.
        stream: as for `quantize_mxfp8`.

    Raises:
        KernelError: a value that is not an array, or not a number, or out of its range.
        BufferMismatchError: arrays of other shapes, dtypes or byte order, not contiguous, read-only, or sharing memory.
    """
    step = whole(step, "the first step of AdamW is step 1", KernelError, 1, _MOST_STEPS)
    lr, weight_decay = _finite(lr, "lr"), _finite(weight_decay, "weight_decay")
    eps = number(eps, "eps is a number of 0 or more", KernelError, 0)
    beta1 = number(beta1, "beta1 is a number from 0 to below 1", KernelError, 0, 1)
    beta2 = number(beta2, "beta2 is a number from 0 to below 1", KernelError, 0, 1)
    arrays = _checked({"param": param, "grad": grad, "first": first, "second": second})
    scale = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    scalars = (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, scale, root, eps)
    if arrays[0].size:
        engine_for(*arrays).adamw(arrays[0], arrays[1], arrays[2], arrays[3], scalars)


@takes_stream
def sgd_step(
    param: Array, grad: Array, buffer: Array | None, *, lr: float, momentum: float, weight_decay: float, first: bool,
    stream: Stream = None,
) -> None:  # fmt: skip
    """Update parameters, and the momentum buffer, in place by SGD.

    In float32, each operation rounded once: d = g + decay * p; b = d at the first step, else momentum * b + d;
    p = p - lr * b. Without a buffer b is d. It is PyTorch's SGD without dampening.

    Args:
        param: float32 [n], contiguous.
        grad: the same, left as it is.
        buffer: the same, or None.
        lr: learning rate.
        momentum: decay of the buffer.
        weight_decay: times p, added to the gradient.
        first: the buffer holds nothing yet.
        stream: as for `quantize_mxfp8`.

    Raises:
        KernelError: a value that is not an array, or not a number.
        BufferMismatchError: as for `adamw_step`.
    """
    scalars = (_finite(lr, "lr"), _finite(momentum, "momentum"), _finite(weight_decay, "weight_decay"))
    is_first = truth(first, "first is True or False", KernelError)
    named = {"param": param, "grad": grad}
    if buffer is not None:
        named["buffer"] = buffer
    arrays = _checked(named)
    mode = 0 if buffer is None else 1 if is_first else 2
    if arrays[0].size:
        last = arrays[0] if buffer is None else arrays[2]
        engine_for(*arrays).sgd(arrays[0], arrays[1], last, mode, scalars)


def _finite(value: float, name: str) -> float:
    return number(value, f"{name} of an optimizer step is a finite number", KernelError)


def _checked(named: dict[str, Array]) -> list[Array]:
    """Return the arrays, float32, flat, of one length, apart from each other."""
    arrays = [require_array(array, name) for name, array in named.items()]
    names = list(named)
    for name, array in zip(names, arrays, strict=True):
        if dtype_name(array.dtype) != "float32" or array.ndim != 1 or array.size != arrays[0].size:
            raise BufferMismatchError(
                f"{name} of an optimizer step is float32 [{arrays[0].size}], got {dtype_name(array.dtype)} "
                f"{list(array.shape)}"
            )
        require_native(array, name)
        if not array.flags.c_contiguous or (name != "grad" and not getattr(array.flags, "writeable", True)):
            raise BufferMismatchError(f"{name} of an optimizer step is contiguous and writeable")
        if is_gpu(array) and address(array) % 4:  # an error there leaves the whole context unusable
            raise BufferMismatchError(
                f"{name} of an optimizer step begins at a multiple of 4 bytes on a GPU, got {address(array):#x}; "
                "copy it"
            )
    for i, one in enumerate(arrays):
        for j in range(i):
            require_apart(one, names[i], arrays[j], names[j])
    return arrays
