"""Layouts of a server's key-value caches and state-space model states, for the same planner as weights."""

from __future__ import annotations

from collections.abc import Sequence

from lowshard.argument import as_shape, whole, wholes
from lowshard.errors import LayoutError
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.tensor_layout import TensorLayout


def kv_cache_layout(
    layers: int, heads: int, inner: Sequence[int], dtype: object = "bfloat16", *, tp: int = 1, pp: int = 1,
    copies: int = 1, windows: Sequence[int] | None = None, offset: int = 0,
) -> TensorLayout:  # fmt: skip
    """Return the layout of a key-value cache [layers, heads, *inner].

    Layers are sharded over pipeline stages, heads over tensor-parallel ranks; with more ranks than heads, neighbouring
    ranks hold the same head. rank = offset + (copy * pp + stage) * tp + part.

    Args:
        layers: of the model.
        heads: KV heads.
        inner: the dims of one head of one layer: blocks, tokens, head size, ...
        dtype: of the cache.
        tp: tensor-parallel ranks; a multiple of the heads, or a divisor.
        pp: pipeline stages.
        copies: replicas, such as expert-parallel ranks.
        windows: layers of each stage, where stages have unequal numbers of layers.
        offset: the first rank.

    Raises:
        LayoutError: tp and heads do not divide, or the windows do not add up.
    """
    layers, heads, tp, pp, copies = _counts(layers=layers, heads=heads, tp=tp, pp=pp, copies=copies)
    inner = as_shape(inner, "inner is the extents of one head of one layer", LayoutError)
    if windows is not None:
        windows = wholes(windows, "windows are the layers of each stage, 0 or more", LayoutError, 0)
    if tp % heads and heads % tp:
        raise LayoutError(f"tp and heads divide each other, got tp {tp} and {heads} heads")
    if windows is not None and (len(windows) != pp or sum(windows) != layers):
        raise LayoutError(f"windows are the layers of {pp} stages, {layers} in all, got {list(windows)}")
    parts = min(tp, heads)
    axes = {"copy": (copies, pp * tp), "pp": (pp, tp), "tp": (parts, tp // parts), "same": (tp // parts, 1)}
    dims = {
        0: DimSharding(layers, pp) if windows is None else DimSharding.sizes(tuple(windows)),
        1: DimSharding(heads, parts),
    }
    return TensorLayout.sharded(
        (layers, heads, *inner), dtype, axes, dims, by={0: "pp", 1: "tp"}, offset=offset
    )


def ssm_state_layouts(
    layers: int, heads: int, head_dim: int, groups: int, state_dim: int, conv_width: int, dtype: object = "float32", *,
    batch: int = 1, tp: int = 1, pp: int = 1, offset: int = 0,
) -> dict[str, TensorLayout]:  # fmt: skip
    """Return the layouts of a Mamba-2 model's states: "conv" and "recurrent".

    conv is [layers, batch, channels, conv_width]; its channels are the blocks x (heads * head_dim), B and C (groups *
    state_dim each), each sharded separately. recurrent is [layers, batch, heads, head_dim, state_dim], sharded by
    heads. rank = offset + stage * tp + part.

    Source: T. Dao, A. Gu, arXiv 2405.21060, section 7 (the block's projections and its convolution).

    Raises:
        LayoutError: a size that is not a number of 1 or more, or parts that do not divide.
    """
    layers, heads, head_dim, groups, state_dim, conv_width, batch, tp, pp = _counts(
        layers=layers, heads=heads, head_dim=head_dim, groups=groups, state_dim=state_dim, conv_width=conv_width,
        batch=batch, tp=tp, pp=pp,
    )  # fmt: skip
    x, band = heads * head_dim, groups * state_dim
    channels = x + 2 * band
    axes = {"pp": (pp, tp), "tp": (tp, 1)}
    conv = DimSharding(channels, tp, blocks=(x, band, band))
    return {
        "conv": TensorLayout.sharded(
            (layers, batch, channels, conv_width), dtype, axes, {0: DimSharding(layers, pp), 2: conv},
            by={0: "pp", 2: "tp"}, offset=offset,
        ),
        "recurrent": TensorLayout.sharded(
            (layers, batch, heads, head_dim, state_dim), dtype, axes,
            {0: DimSharding(layers, pp), 2: DimSharding(heads, tp)}, by={0: "pp", 2: "tp"}, offset=offset,
        ),
    }  # fmt: skip


def _counts(**given: object) -> list[int]:
    return [whole(value, f"{name} is a number of 1 or more", LayoutError, 1) for name, value in given.items()]
