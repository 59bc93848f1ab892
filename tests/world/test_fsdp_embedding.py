"""Parameters in other frameworks' hands: views where they take them, copies where arrays are immutable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.fsdp import FSDP, Param

SHAPE = (6, 5)
X = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)


def trained(forward_backward: Callable[[Any], np.ndarray]) -> None:
    """Compare one gradient, of sum(tanh(x @ w)), with NumPy's."""

    def run(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", SHAPE)]}, comm) as engine:
            engine.fill(lambda name, box: np.add.outer(np.arange(*box[0]), np.arange(*box[1])) * 0.1)
            with engine.step():
                view = engine.open("u", "backward")["w"]
                gradient = forward_backward(view)
                wanted = X.T @ (1 - np.tanh(X @ view) ** 2)
                engine.add_grad("u", "w", np.asarray(gradient))
                engine.reduce("u")
                engine.close("u")
            engine.join()
            found = next(engine.slots())
            for piece in found.pieces:
                mine = wanted.reshape(-1)[piece.param_lo : piece.param_hi]
                np.testing.assert_allclose(found.grad[piece.shard_lo : piece.shard_hi], mine, rtol=1e-4)

    lc.run_loopback(2, run, 60)


def test_jax_takes_a_copy_when_a_unit_is_opened() -> None:
    """Its arrays are immutable and may be kept: a view would change under it when the unit is closed."""
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

    def step(view: np.ndarray) -> np.ndarray:
        w = jax.numpy.array(view, copy=True)
        assert not np.shares_memory(np.asarray(w), view)
        return np.asarray(jax.grad(lambda w: jax.numpy.tanh(X @ w).sum())(w))

    trained(step)


def test_torch_shares_by_dlpack() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

    def step(view: np.ndarray) -> np.ndarray:
        w = torch.from_dlpack(view)
        assert w.data_ptr() == view.ctypes.data
        return np.asarray(torch.autograd.grad((torch.from_numpy(X) @ w.requires_grad_()).tanh().sum(), w)[0])

    trained(step)


def test_numpy_shares_by_dlpack() -> None:
    def step(view: np.ndarray) -> np.ndarray:
        w = np.from_dlpack(view)
        assert np.shares_memory(w, view)
        return np.asarray(X.T @ (1 - np.tanh(X @ w) ** 2))

    trained(step)
