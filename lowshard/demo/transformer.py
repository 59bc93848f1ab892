"""A transformer written by hand, forward and backward, trained with FSDP on real text: an example to start from.

    lowshard run -n 4 -m lowshard.demo.transformer --strategy full --steps 60

The text is the documentation that comes with Python, byte by byte. Nothing here knows of ranks but `main`: layers take
what `FSDP.open` gives and write into what `FSDP.grads` gives, with NumPy or CuPy arrays alike.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard.box import Box, shape_of
from lowshard.comm import Communicator
from lowshard.fsdp import FSDP, AdamW, Param, ShardingStrategy

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Views = Mapping[str, Array]

STRATEGIES = {
    "full": ShardingStrategy.FullShard,
    "grad-op": ShardingStrategy.ShardGradOp,
    "none": ShardingStrategy.NoShard,
    "hybrid": ShardingStrategy.HybridShard(intra_node_size=2),
}
_GELU = math.sqrt(2 / math.pi)
_EPS = 1e-5
_BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 48

    @property
    def units(self) -> dict[str, list[Param]]:
        """Parameters by unit: the embedding, which the head is tied to, and the blocks."""
        d = self.width
        block = [
            Param("g1", (d,)), Param("b1", (d,)), Param("qkv", (d, 3 * d)), Param("out", (d, d)),
            Param("g2", (d,)), Param("b2", (d,)), Param("up", (d, 4 * d)), Param("down", (4 * d, d)),
        ]  # fmt: skip
        embed = [Param("token", (_BYTES, d)), Param("place", (self.context, d))]
        head = [Param("g", (d,)), Param("b", (d,)), Param("token", (_BYTES, d), tie="embed.token")]
        return {"embed": embed, **{f"block{i}": block for i in range(self.layers)}, "head": head}

    def first(self, name: str, box: Box) -> np.ndarray:
        """Return first values of a box of a parameter, the same however parameters are cut."""
        extents = shape_of(box)
        short = name.split(".")[1]
        if short[0] in "gb" and len(box) == 1:
            return np.full(extents, 1.0 if short[0] == "g" else 0.0, np.float32)
        rows = [
            np.random.default_rng([*name.encode(), row]).standard_normal(box[1][1], np.float32)[box[1][0] :]
            for row in range(*box[0])
        ]
        return np.asarray(np.stack(rows) * np.float32(0.02))


class Transformer:
    """Pre-norm blocks with causal attention (Vaswani et al., arXiv 1706.03762) and GELU, over bytes."""

    def __init__(self, shape: Shape, engine: FSDP, xp: Any = np) -> None:
        self.shape, self.engine, self.xp = shape, engine, xp

    def loss(self, tokens: Array, targets: Array, backward: bool = True) -> float:
        """Return the mean cross entropy of tokens `[batch, context]`; with backward also reduce all gradients."""
        engine, xp, names = self.engine, self.xp, [f"block{i}" for i in range(self.shape.layers)]
        p = engine.open("embed")
        x = p["token"][tokens] + p["place"]
        engine.close("embed")
        kept = []
        for name in names:
            x, saved = self._block(engine.open(name), x)
            kept.append(saved)
            engine.close(name)
        p = engine.open("head")
        y, norm = layer_norm(x, p["g"], p["b"], xp)
        logits = y @ p["token"].T
        engine.close("head")
        logits -= logits.max(-1, keepdims=True)
        logits -= xp.log(xp.exp(logits).sum(-1, keepdims=True))
        rows = xp.arange(targets.size)
        loss = -float(logits.reshape(-1, _BYTES)[rows, targets.reshape(-1)].mean())
        if not backward:
            return loss
        d = xp.exp(logits).reshape(-1, _BYTES)
        d[rows, targets.reshape(-1)] -= 1
        d = (d / np.float32(targets.size)).reshape(logits.shape)
        p = engine.open("head", "backward")
        g = engine.grads("head")
        g["token"][...] += flat(d).T @ flat(y)
        dx = layer_norm_back(d @ p["token"], norm, p["g"], g["g"], g["b"])
        engine.reduce("head")
        engine.close("head")
        for name, saved in zip(reversed(names), reversed(kept), strict=True):
            p = engine.open(name, "backward")
            dx = self._block_back(p, engine.grads(name), dx, saved)
            engine.reduce(name)
            engine.close(name)
        engine.open("embed", "backward")
        g = engine.grads("embed")
        xp.add.at(g["token"], tokens, dx)
        g["place"][...] = dx.sum(0)
        engine.reduce("embed")
        engine.close("embed")
        return loss

    def _block(self, p: Views, x: Array) -> tuple[Array, tuple[Array, ...]]:
        xp, (batch, length, width) = self.xp, x.shape
        heads = self.shape.heads
        a, norm1 = layer_norm(x, p["g1"], p["b1"], xp)
        q, k, v = (a @ p["qkv"]).reshape(batch, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) * np.float32(1 / math.sqrt(width // heads))
        scores += xp.triu(xp.full((length, length), -1e9, np.float32), 1)
        scores = xp.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = (scores @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x1 = x + mixed @ p["out"]
        b, norm2 = layer_norm(x1, p["g2"], p["b2"], xp)
        u = b @ p["up"]
        t = xp.tanh(np.float32(_GELU) * (u + np.float32(0.044715) * u * u * u))
        h = np.float32(0.5) * u * (1 + t)
        return x1 + h @ p["down"], (a, norm1, q, k, v, scores, mixed, b, norm2, u, t, h)

    def _block_back(self, p: Views, g: Views, dy: Array, saved: tuple[Array, ...]) -> Array:
        a, norm1, q, k, v, scores, mixed, b, norm2, u, t, h = saved
        batch, heads, length, size = q.shape
        g["down"][...] = flat(h).T @ flat(dy)
        slope = np.float32(_GELU) * (1 + np.float32(3 * 0.044715) * u * u)
        du = (dy @ p["down"].T) * np.float32(0.5) * (1 + t + u * (1 - t * t) * slope)
        g["up"][...] = flat(b).T @ flat(du)
        dx1 = dy + layer_norm_back(du @ p["up"].T, norm2, p["g2"], g["g2"], g["b2"])
        g["out"][...] = flat(mixed).T @ flat(dx1)
        dmixed = (dx1 @ p["out"].T).reshape(batch, length, heads, size).transpose(0, 2, 1, 3)
        dscores = dmixed @ v.swapaxes(-1, -2)
        dscores = (
            scores * (dscores - (dscores * scores).sum(-1, keepdims=True)) * np.float32(1 / math.sqrt(size))
        )
        parts = self.xp.stack([dscores @ k, dscores.swapaxes(-1, -2) @ q, scores.swapaxes(-1, -2) @ dmixed])
        dqkv = parts.transpose(1, 3, 0, 2, 4).reshape(batch, length, 3 * heads * size)
        g["qkv"][...] = flat(a).T @ flat(dqkv)
        return dx1 + layer_norm_back(dqkv @ p["qkv"].T, norm1, p["g1"], g["g1"], g["b1"])


def flat(x: Array) -> Array:
    """Return `[batch, length, width]` as `[batch * length, width]`."""
    return x.reshape(-1, x.shape[-1])


def layer_norm(x: Array, gain: Array, bias: Array, xp: Any) -> tuple[Array, tuple[Array, Array]]:
    """Return the layer norm of the last dim (Ba et al., arXiv 1607.06450), and what its backward needs."""
    centred = x - x.mean(-1, keepdims=True)
    scale = 1 / xp.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(_EPS))
    unit = centred * scale
    return unit * gain + bias, (unit, scale)


def layer_norm_back(dy: Array, saved: tuple[Array, Array], gain: Array, dgain: Array, dbias: Array) -> Array:
    """Return the gradient of x, and write those of gain and bias."""
    unit, scale = saved
    dgain[...] = flat(dy * unit).sum(0)
    dbias[...] = flat(dy).sum(0)
    d = dy * gain
    return scale * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True))


def text() -> bytes:
    """Return the documentation of the Python language that comes with it."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def batch_of(data: bytes, shape: Shape, rows: int, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of text at random places, and the byte after each."""
    starts = np.random.default_rng(seed).integers(0, len(data) - shape.context - 1, rows)
    pieces = np.array([list(data[at : at + shape.context + 1]) for at in starts], np.int64)
    return pieces[:, :-1], pieces[:, 1:]


def train(
    comm: Communicator, strategy: ShardingStrategy, steps: int, shape: Shape | None = None, rows: int = 8
) -> list[float]:
    """Train and return the mean loss of each step, equal on all ranks.

    Collective: all ranks of the communicator call this.
    """
    shape, data = shape or Shape(), text()
    losses = []
    with FSDP(shape.units, comm, strategy, open_limit=3) as engine:
        engine.fill(shape.first)
        model, rule = Transformer(shape, engine, comm.xp), AdamW(lr=3e-3, weight_decay=0.01, decay=_decays)
        for step in range(steps):
            with engine.step():
                tokens, targets = (
                    comm.xp.asarray(part) for part in batch_of(data, shape, rows, (step, comm.rank))
                )
                loss = comm.xp.full(1, model.loss(tokens, targets), np.float32)
            engine.join()
            engine.clip(1.0)
            engine.update(rule)
            engine.broadcast_updated_params()
            mean = comm.xp.empty_like(loss)
            comm.all_reduce(loss, mean, "avg", "tree")
            losses.append(float(mean[0]))
    return losses


def _decays(name: str) -> bool:
    return name.split(".")[1] in ("qkv", "out", "up", "down", "token")


def main() -> int:
    """Run as a program; see the module's first lines."""
    parser = argparse.ArgumentParser(
        description="Trains a small transformer on Python's documentation, sharded."
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default="full", help="what is sharded (default full)"
    )
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps (default 60)")
    args = parser.parse_args()
    from mpi4py import MPI

    from lowshard import comm as lc

    with lc.from_mpi(MPI.COMM_WORLD) as comm:
        begun_s = time.perf_counter()
        losses = train(comm, STRATEGIES[args.strategy], args.steps)
        if comm.rank == 0:
            took_s = time.perf_counter() - begun_s
            print(
                f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps, {took_s:.1f} s, {comm.size} ranks"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
