"""A model with everything uneven, trained by FSDP and by plain NumPy: what the tests of sharded training compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.checkpoint import CheckpointReader
from lowshard.fsdp import FSDP, AdamW, Param, ShardingStrategy

# Primes, a first dim below most worlds, a scalar, fewer elements than ranks, tied across units, frozen, ignored.
UNITS = {
    "emb": [Param("e", (7, 5)), Param("mask", (5,), ignored=True)],
    "l0": [Param("w", (5, 37)), Param("b", (37,)), Param("scale", ())],
    "l1": [Param("w", (37, 53)), Param("b", (53,)), Param("f", (53,), trainable=False)],
    "l2": [Param("w", (53, 5)), Param("b", (5,)), Param("tiny", (2,)), Param("b2", (5,), tie="b")],
    "head": [Param("e", (7, 5), tie="emb.e")],
}
SHAPES = {
    f"{unit}.{p.name}": p.shape for unit, params in UNITS.items() for p in params if p.tie is None
}  # fmt: skip
TRAINED = [
    f"{u}.{p.name}" for u, ps in UNITS.items() for p in ps if p.tie is None and p.trainable and not p.ignored
]
ROWS = 6

STRATEGIES = {
    "full": ShardingStrategy.FullShard,
    "sgo": ShardingStrategy.ShardGradOp,
    "sgo-sharded": ShardingStrategy.ShardGradOp(rest="sharded"),
    "none": ShardingStrategy.NoShard,
    "hybrid1": ShardingStrategy.HybridShard(intra_node_size=1),
    "hybrid2": ShardingStrategy.HybridShard(intra_node_size=2),
    "hybrid4": ShardingStrategy.HybridShard(intra_node_size=4),
}


def fits(name: str, world: int) -> bool:
    """Say whether the strategy can be on so many ranks."""
    return not name.startswith("hybrid") or world % int(name[6:]) == 0


def initial(name: str) -> np.ndarray:
    """The whole first value of a parameter."""
    if name == "emb.mask":
        return np.array([1, 0.5, 1, 2, 1], np.float32)
    rng = np.random.default_rng(list(name.encode()))
    value = rng.standard_normal(SHAPES[name]).astype(np.float32)
    return np.asarray(value * np.float32(0.5))


def filler(name: str, box: Any) -> np.ndarray:
    return initial(name)[tuple(slice(lo, hi) for lo, hi in box)]


def batch(step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of a micro-batch: different for every one."""
    rng = np.random.default_rng([step, micro, 7])
    return rng.integers(0, 7, ROWS), rng.integers(0, 7, ROWS)


class Model:
    """Forward and backward, by whatever opens parameters and takes gradients."""

    def __init__(self, opener: Any) -> None:
        self.at = opener

    def run(self, tokens: np.ndarray, targets: np.ndarray, backward: bool = True) -> float:
        at = self.at
        p = at.open("emb", "forward")
        x0 = p["e"][tokens] * p["mask"]
        at.close("emb")
        p = at.open("l0", "forward")
        s1 = x0 @ p["w"]
        x1 = np.tanh(s1 * p["scale"] + p["b"])
        at.close("l0")
        p = at.open("l1", "forward")
        x2 = np.tanh(x1 @ p["w"] + p["b"] + p["f"])
        at.close("l1")
        p = at.open("l2", "forward")
        x3 = x2 @ p["w"] + p["b"]
        x3[:, :2] += p["tiny"]
        x3 = x3 + p["b2"]
        at.close("l2")
        p = at.open("head", "forward")
        logits = x3 @ p["e"].T
        z = np.exp(logits - logits.max(1, keepdims=True))
        z /= z.sum(1, keepdims=True)
        loss = float(-np.log(z[np.arange(ROWS), targets]).mean())
        at.close("head")
        if not backward:
            return loss
        d = z
        d[np.arange(ROWS), targets] -= 1
        d /= np.float32(ROWS)
        p = at.open("head", "backward")
        at.grads("head")["e"][...] += d.T @ x3
        d3 = d @ p["e"]
        at.reduce("head")
        at.close("head")
        p = at.open("l2", "backward")
        g = at.grads("l2")
        g["w"][...] = x2.T @ d3
        g["b"][...] += d3.sum(0)
        g["b2"][...] += d3.sum(0)
        g["tiny"][...] = d3[:, :2].sum(0)
        d2 = (d3 @ p["w"].T) * (1 - x2 * x2)
        at.reduce("l2")
        at.close("l2")
        p = at.open("l1", "backward")
        g = at.grads("l1")
        g["w"][...] = x1.T @ d2
        g["b"][...] = d2.sum(0)
        d1 = (d2 @ p["w"].T) * (1 - x1 * x1)
        at.reduce("l1")
        at.close("l1")
        p = at.open("l0", "backward")
        g = at.grads("l0")
        g["w"][...] = x0.T @ (d1 * p["scale"])
        g["scale"][...] = (d1 * s1).sum()
        g["b"][...] = d1.sum(0)
        d0 = (d1 * p["scale"]) @ p["w"].T
        at.reduce("l0")
        at.close("l0")
        p = at.open("emb", "backward")
        np.add.at(at.grads("emb")["e"], tokens, d0 * p["mask"])
        at.reduce("emb")
        at.close("emb")
        return loss


def optimizer() -> AdamW:
    return AdamW(lr=3e-2, weight_decay=0.1, decay=lambda name: not name.endswith(".b"))


CLIP = 0.4


@dataclass
class Trained:
    """What a run gave: norms and losses by step, and what is in the file."""

    norms: list[float] = field(default_factory=list)
    file: bytes = b""


def train(
    comm: lc.Communicator, strategy: ShardingStrategy, steps: Iterable[int] = range(3), micro_batches: int = 8,
    path: Path | None = None, load: Path | None = None, between: Callable[[FSDP], None] | None = None,
    model: type[Model] = Model, **options: Any,
) -> Trained:  # fmt: skip
    """Train; the micro-batches are dealt to ranks in contiguous blocks (with accumulate="reduce" by turns)."""
    result = Trained()
    with FSDP(UNITS, comm, strategy, **options) as engine:
        if load is None:
            engine.fill(filler)
        else:
            engine.load(load)
        rule = optimizer()
        each = micro_batches // comm.size
        for step in steps:
            run_step(engine, comm, step, each, model)
            engine.join()
            result.norms.append(engine.clip(CLIP))
            engine.update(rule)
            engine.broadcast_updated_params()
            if between is not None:
                between(engine)
        if path is not None:
            engine.save(path)
            result.file = path.read_bytes()
    return result


def run_step(engine: FSDP, comm: lc.Communicator, step: int, each: int, model: type[Model] = Model) -> None:
    made = model(engine)
    by_turns = engine._grads._reduces_each
    for k in range(each):
        with engine.step(last=k == each - 1):
            grid, micro = engine.grid, comm.rank * each + k
            if by_turns:  # sums over a shard group come first, those over micro-batches next, replicas last
                micro = (grid.replica_rank * each + k) * grid.shards + grid.shard_rank
            made.run(*batch(step, micro))


# ---- plain NumPy


class Plain:
    """One process, whole arrays, no engine: opens and takes gradients for `Model`."""

    def __init__(self, cast: Callable[[str, np.ndarray], np.ndarray] | None = None) -> None:
        self.value = {name: initial(name) for name in SHAPES}
        self.grad: dict[str, np.ndarray] = {}
        self.m = {name: np.zeros(SHAPES[name], np.float32) for name in TRAINED}
        self.v = {name: np.zeros(SHAPES[name], np.float32) for name in TRAINED}
        self.steps = 0
        self.cast = cast

    def _names(self, unit: str) -> dict[str, str]:
        return {
            p.name: (p.tie if p.tie and "." in p.tie else f"{unit}.{p.tie or p.name}") for p in UNITS[unit]
        }

    def open(self, unit: str, phase: str) -> Mapping[str, np.ndarray]:
        found = {short: self.value[name] for short, name in self._names(unit).items()}
        if self.cast is not None:
            found = {k: self.cast(n, found[k]) for k, n in self._names(unit).items()}
        return found

    def close(self, unit: str) -> None: ...

    def reduce(self, unit: str) -> None: ...

    def grads(self, unit: str) -> Mapping[str, np.ndarray]:
        return {short: self.grad[name] for short, name in self._names(unit).items() if name in self.grad}

    def step(
        self, tokens_targets: list[tuple[np.ndarray, np.ndarray]], clip: float = CLIP, mean: bool = True
    ) -> float:
        """One update from micro-batches in order, their gradients added in a balanced tree."""
        leaves = []
        for tokens, targets in tokens_targets:
            self.grad = {name: np.zeros(SHAPES[name], np.float32) for name in TRAINED}
            Model(self).run(tokens, targets)
            leaves.append(self.grad)
        total = {name: tree([leaf[name] for leaf in leaves]) for name in TRAINED}
        if mean:
            total = {name: np.asarray(g / np.float32(len(leaves))) for name, g in total.items()}
        norm = exact_norm(total.values())
        factor = clip / (norm + 1e-6)
        self.steps += 1
        for name, grad in total.items():
            g = grad * np.float32(factor) if factor < 1 else grad
            decay = 0.0 if name.endswith(".b") else 0.1
            self.adamw(name, np.asarray(g), decay)
        return norm

    def adamw(self, name: str, g: np.ndarray, decay: float) -> None:
        f = np.float32
        lr, b1, b2, eps, t = 3e-2, 0.9, 0.999, 1e-8, self.steps
        p, m, v = self.value[name], self.m[name], self.v[name]
        m[...] = f(b1) * m + f(1 - b1) * g
        v[...] = f(b2) * v + f(1 - b2) * (g * g)
        size = np.sqrt(v) / f(math.sqrt(1 - b2**t)) + f(eps)
        self.value[name] = np.asarray(p * f(1 - lr * decay) - (m / size) * f(lr / (1 - b1**t)), np.float32)


def tree(terms: list[np.ndarray]) -> np.ndarray:
    """Add in a balanced binary tree, the left half taking the odd one."""
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return np.asarray(tree(terms[:half]) + tree(terms[half:]))


def exact_norm(grads: Iterable[np.ndarray]) -> float:
    """The 2-norm from sums of blocks of 32 elements of each array, added without rounding (math.fsum)."""
    sums = []
    for grad in grads:
        squares = np.square(grad.reshape(-1).astype(np.float64))
        padded = np.zeros(-(-squares.size // 32) * 32)
        padded[: squares.size] = squares
        for block in padded.reshape(-1, 4, 8):
            lanes = ((block[0] + block[1]) + block[2]) + block[3]
            half = lanes[:4] + lanes[4:]
            quarter = half[:2] + half[2:]
            sums.append(float(quarter[0] + quarter[1]))
    return math.sqrt(math.fsum(sums))


def plain_run(steps: int, micro_batches: int = 8) -> tuple[Plain, list[float]]:
    plain = Plain()
    norms = [plain.step([batch(s, m) for m in range(micro_batches)]) for s in range(steps)]
    return plain, norms


def check_file(path: Path, plain: Plain, compute: str = "float32") -> None:
    """Compare a file with the plain run, bit for bit: weights, moments, what is frozen, what is ignored."""
    with CheckpointReader(path) as reader:
        assert set(reader.header.tensors) == set(SHAPES) | {f"{n}/{k}" for n in TRAINED for k in "mv"}
        for name in SHAPES:
            wanted = plain.value[name]
            if name == "emb.mask":  # ignored parameters are held as they are computed with
                wanted = wanted.astype(dtypes.get(compute).numpy)
            same_bits(reader.read_box(name), wanted, name)
        for name in TRAINED:
            same_bits(reader.read_box(f"{name}/m"), plain.m[name], f"{name}/m")
            same_bits(reader.read_box(f"{name}/v"), plain.v[name], f"{name}/v")


def same_bits(found: np.ndarray, wanted: np.ndarray, name: str = "") -> None:
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    assert found.dtype == wanted.dtype, (name, found.dtype, wanted.dtype)
    if found.tobytes() != wanted.tobytes():
        worst = np.max(np.abs(found.astype(np.float64) - wanted.astype(np.float64)))
        raise AssertionError(
            f"{name}: {np.count_nonzero(found != wanted)} of {found.size} differ, by {worst} at most"
        )
