"""Random operands and arguments for every op: uneven, short and empty extents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard.solver.table.elementwise_rules import COMPARISONS, NONLINEAR, TESTS

Rng = np.random.Generator
Sample = tuple[list[np.ndarray], dict[str, Any]]

EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)


def extent(rng: Rng) -> int:
    return int(rng.choice(EXTENTS))


def shape(rng: Rng, low: int = 1, high: int = 3) -> tuple[int, ...]:
    found = [extent(rng) for _ in range(int(rng.integers(low, high + 1)))]
    if rng.random() < 0.1:
        found[int(rng.integers(len(found)))] = 0
    return tuple(found)


def solid(rng: Rng, low: int = 1, high: int = 3) -> tuple[int, ...]:
    return tuple(extent(rng) for _ in range(int(rng.integers(low, high + 1))))


def real(rng: Rng, *extents: int) -> np.ndarray:
    """Small multiples of a quarter: sums of a few are exact in any order."""
    return np.asarray(rng.integers(-12, 13, extents) / 4, np.float32)


def _unary(rng: Rng) -> Sample:
    return [real(rng, *shape(rng))], {}


def _scalar(rng: Rng) -> Sample:
    return [real(rng, *shape(rng))], {"value": 2}


def _pair(rng: Rng) -> Sample:
    out = shape(rng)
    a = tuple(1 if rng.random() < 0.2 else n for n in out)
    b = tuple(1 if n != m and rng.random() < 0 else n for n, m in zip(out, a, strict=True))
    cut = int(rng.integers(len(out) + 1)) if rng.random() < 0.4 else 0
    operands = [real(rng, *a), real(rng, *b[cut:])]
    return operands[:: int(rng.choice([1, -1]))], {}


def _powers(rng: Rng) -> Sample:
    (a, b), _ = _pair(rng)
    return [np.asarray(np.abs(a) + 1), np.asarray(np.round(b))], {}


def _moduli(rng: Rng) -> Sample:
    (a, b), _ = _pair(rng)
    return [a, np.asarray(np.abs(b) + 1)], {}


def _where(rng: Rng) -> Sample:
    out = shape(rng)
    cut = int(rng.integers(len(out)))
    return [rng.integers(0, 2, out).astype(np.float32), real(rng, *out), real(rng, *out[cut:])], {}


def _same(rng: Rng) -> Sample:
    out = shape(rng)
    return [real(rng, *out), real(rng, *out)], {}


def _matmul(rng: Rng) -> Sample:
    m, k, n = extent(rng), extent(rng), extent(rng)
    kind = int(rng.integers(6))
    if kind == 0:
        return [real(rng, k), real(rng, k)], {}
    if kind == 1:
        return [real(rng, k), real(rng, *([extent(rng)] * int(rng.integers(2))), k, n)], {}
    if kind == 2:
        return [real(rng, *([extent(rng)] * int(rng.integers(2))), m, k), real(rng, k)], {}
    batch = shape(rng, 1, 2) if kind > 3 else ()
    left = tuple(1 if rng.random() < 0.25 else b for b in batch)
    right = batch[int(rng.integers(len(batch) + 1)) :] if batch else ()
    return [real(rng, *left, m, k), real(rng, *right, k, n)], {}


def _plain_matmul(rng: Rng) -> Sample:
    m, k, n = extent(rng), extent(rng), extent(rng)
    return [real(rng, m, k), real(rng, k, n)], {}


def _outer(rng: Rng) -> Sample:
    return [real(rng, extent(rng)), real(rng, extent(rng))], {}


def _einsum(rng: Rng) -> Sample:
    text = str(rng.choice(["bik,bkj->bij", "ij->ji", "ij,j->i", "bhld,bhtd->bhlt", "ab,bc,cd->ad", "ij->"]))
    size = {c: extent(rng) for c in text if c.isalpha()}
    return [real(rng, *(size[c] for c in t)) for t in text.split("->")[0].split(",")], {"subscripts": text}


def _conv(space: int, transposed: bool) -> Callable[[Rng], Sample]:
    def make(rng: Rng) -> Sample:
        groups = 1 if transposed or rng.random() < 0.6 else 2
        cin, cout = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
        first = rng.random() < 0.4
        places = [int(rng.integers(3, 6)) for _ in range(space)]
        taps = [int(rng.integers(1, 4)) for _ in range(space)]
        x = (extent(rng), cin, *places) if first else (extent(rng), *places, cin)
        w = (*taps, cout, cin) if transposed else (*taps, cin // groups, cout)
        operands = [real(rng, *x), real(rng, *w)] + ([real(rng, cout)] if rng.random() < 0.5 else [])
        padding = 0 if transposed else int(rng.integers(2))
        name = "NCHW" if first else "NHWC"
        return operands, {
            "stride": int(rng.integers(1, 3)), "padding": padding, "groups": groups, "layout": name
        }  # fmt: skip

    return make


def _grouped(rng: Rng) -> Sample:
    t, k, n, e = (extent(rng) for _ in range(4))
    starts = np.sort(rng.integers(0, t + 1, e + 1))
    starts[0], starts[-1] = 0, t
    operands = [real(rng, t, k), real(rng, e, n, k), starts.astype(np.int64)]
    extra = [np.arange(e).astype(np.int64), np.zeros(2, np.int64)] if rng.random() < 0.5 else []
    return operands + extra, {}


def _axis(low: int = 1, solid_only: bool = False) -> Callable[[Rng], Sample]:
    def make(rng: Rng) -> Sample:
        found = solid(rng, low) if solid_only else shape(rng, low)
        return [real(rng, *found)], {"axis": int(rng.integers(-len(found), len(found)))}

    return make


def _reduce(rng: Rng) -> Sample:
    (x,), args = _axis()(rng)
    if rng.random() < 0.2:
        args["axis"] = tuple(range(x.ndim)) if rng.random() < 0.5 else None
    return [x], args


def _mean(rng: Rng) -> Sample:
    (x,), args = _axis(solid_only=True)(rng)
    return [x], args


def _prod(rng: Rng) -> Sample:
    (x,), args = _axis()(rng)
    return [np.clip(np.round(x), -2, 2)], args


def _norm(biases: tuple[int, ...]) -> Callable[[Rng], Sample]:
    def make(rng: Rng) -> Sample:
        found = solid(rng, 2)
        lead = int(rng.integers(1, len(found)))
        count = 1 + int(rng.choice(biases))
        return [real(rng, *found), *(real(rng, *found[lead:]) for _ in range(count))], {"eps": 1e-3}

    return make


def _group_norm(rng: Rng) -> Sample:
    return [real(rng, extent(rng), 4, extent(rng)), real(rng, 4), real(rng, 4)], {"groups": 2}


def _pool(rng: Rng) -> Sample:
    size = int(rng.integers(1, 4))
    return [real(rng, extent(rng), 6, 5, extent(rng))], {"size": size, "stride": int(rng.integers(1, 3))}


def _permute(rng: Rng) -> Sample:
    found = shape(rng)
    return [real(rng, *found)], {"dims": [int(d) for d in rng.permutation(len(found))]}


def _transpose(rng: Rng) -> Sample:
    found = shape(rng)
    a, b = (int(rng.integers(-len(found), len(found))) for _ in range(2))
    return [real(rng, *found)], {"axis_1": a, "axis_2": b}


def _unsqueeze(rng: Rng) -> Sample:
    found = shape(rng)
    return [real(rng, *found)], {"axis": int(rng.integers(-len(found) - 1, len(found) + 1))}


def _squeeze(rng: Rng) -> Sample:
    found = list(shape(rng))
    at = int(rng.integers(len(found) + 1))
    return [real(rng, *found[:at], 1, *found[at:])], {"axis": at}


def _reshape(rng: Rng) -> Sample:
    pairs = [
        ((4, 8), (4, 2, 4)), ((4, 8), (32,)), ((2, 16, 48), (2, 16, 6, 8)), ((6, 8), (48,)), ((48,), (6, 8)),
        ((5, 6), (30,)), ((12, 2), (3, 8)), ((3, 4, 5), (12, 5)), ((2, 3, 4), (2, 12)), ((8, 6), (1, 8, 6)),
        ((9, 4), (3, 3, 2, 2)), ((6, 8, 16), (6, 128)), ((7, 3), (7, 3, 1)), ((10, 6), (5, 12)), ((1, 6), (6,)),
        ((5, 6, 7), (30, 7)), ((4, 0), (2, 0)),
    ]  # fmt: skip
    source, target = pairs[int(rng.integers(len(pairs)))]
    asked = list(target)
    if 0 not in target and rng.random() < 0.3:
        asked[int(rng.integers(len(asked)))] = -1
    return [real(rng, *source)], {"shape": asked}


def _flatten(rng: Rng) -> Sample:
    found = solid(rng, 2)
    start = int(rng.integers(len(found)))
    return [real(rng, *found)], {"start": start, "end": int(rng.integers(start, len(found)))}


def _broadcast(rng: Rng) -> Sample:
    target = solid(rng)
    cut = int(rng.integers(len(target)))
    source = [1 if rng.random() < 0.4 else n for n in target[cut:]]
    return [real(rng, *source)], {"shape": list(target)}


def _concat(rng: Rng) -> Sample:
    found = shape(rng)
    at = int(rng.integers(len(found)))
    many = [
        [extent(rng) if d == at else n for d, n in enumerate(found)] for _ in range(int(rng.integers(1, 4)))
    ]
    return [real(rng, *s) for s in many], {"axis": at}


def _stack(rng: Rng) -> Sample:
    found = shape(rng)
    return [real(rng, *found) for _ in range(int(rng.integers(1, 4)))], {
        "axis": int(rng.integers(-len(found) - 1, len(found) + 1))
    }


def _split(rng: Rng) -> Sample:
    found = list(shape(rng))
    at = int(rng.integers(len(found)))
    sizes = [int(rng.integers(1, 7)) for _ in range(int(rng.integers(1, 4)))]
    found[at] = sum(sizes)
    return [real(rng, *found)], {"sizes": sizes, "axis": at}


def _chunk(rng: Rng) -> Sample:
    (x,), args = _axis()(rng)
    return [x], {**args, "chunks": int(rng.integers(1, 5))}


def _slice(rng: Rng) -> Sample:
    found = shape(rng)
    entries: list[Any] = []
    for n in found:
        a, b = sorted(int(i) for i in rng.integers(0, n + 1, 2))
        kind = int(rng.integers(4))
        entries.append(None if kind == 0 else [a, b] if kind < 3 else [a, b, int(rng.integers(1, 4))])
    return [real(rng, *found)], {"slices": entries}


def _pad(rng: Rng) -> Sample:
    found = solid(rng)
    pads = [[0, 0] if rng.random() < 0.5 else [int(rng.integers(3)), int(rng.integers(3))] for _ in found]
    if rng.random() < 0.3:
        return [real(rng, *found)], {"pads": pads, "mode": "edge"}
    return [real(rng, *found)], {"pads": pads, "value": int(rng.integers(2))}


def _repeat(rng: Rng) -> Sample:
    (x,), args = _axis()(rng)
    return [x], {"repeats": 2, **(args if rng.random() < 0.8 else {})}


def _tile(rng: Rng) -> Sample:
    found = shape(rng)
    return [real(rng, *found)], {"repeats": [int(rng.integers(1, 3)) for _ in found]}


def _band(rng: Rng) -> Sample:
    return [real(rng, *solid(rng, 2))], {"lower": int(rng.integers(-1, 3)), "upper": int(rng.integers(-1, 3))}


def _resize(rng: Rng) -> Sample:
    x = real(rng, extent(rng), extent(rng), extent(rng), extent(rng))
    return [x], {"size": [extent(rng), extent(rng)]}


def _irfft(rng: Rng) -> Sample:
    return [real(rng, *solid(rng, 1, 2), int(rng.integers(2, 6)))], {}


def _complex(rng: Rng) -> Sample:
    return [real(rng, *solid(rng, 1, 2), 2 * int(rng.integers(1, 5)))], {}


def _fold(rng: Rng) -> Sample:
    n, c = extent(rng), int(rng.integers(1, 3))
    return [real(rng, n, c * 4, 3 * 4)], {"shape": [n, c, 4, 5], "kernel": [2, 2]}


def _gather(rng: Rng) -> Sample:
    table = solid(rng)
    at = int(rng.integers(len(table)))
    ids = rng.integers(-table[at], table[at], shape(rng, 1, 2))
    return [real(rng, *table), ids.astype(np.int64)], {"axis": at}


def _embedding(rng: Rng) -> Sample:
    table = solid(rng, 2, 2)
    return [real(rng, *table), rng.integers(0, table[0], shape(rng, 1, 2)).astype(np.int32)], {}


def _gather_nd(rng: Rng) -> Sample:
    batch = int(rng.integers(0, 2))
    x = solid(rng, 2 + batch, 3)
    n = int(rng.integers(1, len(x) - batch + 1))
    ids = np.stack([rng.integers(0, x[batch + i], (*x[:batch], 3)) for i in range(n)], axis=-1)
    return [real(rng, *x), ids.astype(np.int64)], {"batch_dims": batch}


def _scatter(rng: Rng) -> Sample:
    x = solid(rng, 1, 2)
    at = int(rng.integers(len(x)))
    u = tuple(min(n, extent(rng)) if d == at or rng.random() < 0.3 else n for d, n in enumerate(x))
    places = np.argsort(rng.random(x), axis=at)[tuple(slice(0, n) for n in u)]
    return [real(rng, *x), real(rng, *u), places.astype(np.int64)], {"axis": at}


def _top_k(rng: Rng) -> Sample:
    (x,), args = _axis(solid_only=True)(rng)
    return [x], {**args, "k": int(rng.integers(1, x.shape[args["axis"]] + 1))}


def _attention(rng: Rng) -> Sample:
    kv = int(rng.choice([1, 2, 3, 4]))
    heads = kv * int(rng.integers(1, 4))
    b, rows, keys, d, e = (extent(rng) for _ in range(5))
    rows = min(rows, keys)
    operands = [real(rng, b, heads, rows, d), real(rng, b, kv, keys, d), real(rng, b, kv, keys, e)]
    return operands, {"causal": bool(rng.integers(2))}


def _moe(rng: Rng) -> Sample:
    t, k, d = extent(rng), 2, extent(rng)
    return [real(rng, t * k, d), rng.permutation(t * k).reshape(t, k).astype(np.int64), real(rng, t, k)], {}


def _silu_halves(rng: Rng) -> Sample:
    return [real(rng, *solid(rng, 1, 2), 2 * extent(rng))], {}


def _many(rng: Rng) -> Sample:
    return [real(rng, *shape(rng)) for _ in range(int(rng.integers(1, 4)))], {}


SAMPLES: dict[str, Callable[[Rng], Sample]] = {
    **dict.fromkeys((*NONLINEAR, *TESTS, "negate", "passthrough", "cast", "dequantize"), _unary),
    **dict.fromkeys(("mul_scalar", "add_scalar", "pow_scalar"), _scalar),
    **dict.fromkeys((*COMPARISONS, "add", "sub", "mul", "maximum", "minimum", "complex_mul"), _pair),
    "pow": _powers, "mod": _moduli, "div": _moduli, "where": _where, "buffer_store": _same, "rebind": _many,
    "matmul": _matmul, "qmatmul": _plain_matmul, "outer": _outer, "einsum": _einsum,
    "conv2d": _conv(2, False), "conv3d": _conv(3, False),
    "conv2d_transpose": _conv(2, True), "conv3d_transpose": _conv(3, True), "grouped_matmul": _grouped,
    "sum": _reduce, "mean": _mean, "max": _reduce, "min": _reduce, "prod": _prod,
    "argmax": _axis(solid_only=True), "argmin": _axis(solid_only=True), "softmax": _axis(), "logsoftmax": _axis(),
    "cumsum": _axis(), "layer_norm": _norm((1,)), "rms_norm": _norm((0, 1)), "group_norm": _group_norm,
    "max_pool": _pool, "avg_pool": _pool, "permute": _permute, "transpose": _transpose,
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "reshape": _reshape, "flatten": _flatten,
    "broadcast_to": _broadcast, "concat": _concat, "stack": _stack, "split": _split, "chunk": _chunk,
    "slice": _slice, "pad": _pad, "repeat_interleave": _repeat, "tile": _tile, "band_part": _band,
    "resize": _resize, "irfft": _irfft, "interleaved_complex": _complex, "fold": _fold,
    "gather": _gather, "embedding": _embedding, "gather_nd": _gather_nd,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul"), _scatter),
    "top_k": _top_k, "bottom_k": _top_k, "top_k_values": _top_k, "argsort": _axis(), "sort": _axis(),
    "attention": _attention, "moe_finalize": _moe, "fused_silu": _silu_halves,
}  # fmt: skip
