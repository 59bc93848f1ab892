"""`shard_module`: the weights of a module, sharded by one strategy each or by a marker for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowshard.argument import instance, mapping
from lowshard.errors import ShardingError
from lowshard.weights.scale_rules import ScalesOf, weights_of_scales, with_scales
from lowshard.weights.shard_rules import (
    Axiswise,
    Columnwise,
    ExpertRange,
    GateUp,
    Owned,
    Replicate,
    Rowwise,
    Rule,
)
from lowshard.weights.sharding_strategy import ShardingStrategy
from lowshard.weights.weight import Weight

_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")

# Last parts of names, as Hugging Face's models have them: which side of a weight [out, in] is cut.
_OUT = ("gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "wi", "wi_0", "wi_1", "intermediate.dense")
_IN = ("down_proj", "w2", "fc2", "wo", "output.dense")
_ATTENTION = re.compile(r"(?i)(?:attn|attention)[^.]*\.(?:wo|output\.dense)$")  # whose names an MLP has, too
_STACKED = ("gate_up_proj", "w13")
_WHOLE = ("gate", "router", "norm", "layernorm", "LayerNorm", "shared_expert_gate")


def shard_module(
    weights: Mapping[str, Weight | Any], strategies: Mapping[str, ShardingStrategy]
) -> list[dict[str, Weight]]:
    """Return for each device its parts of a module's weights, by name.

    A strategy is given for a weight's name, or for the module above it (`model.layers.0.mlp`, or "" for
    all); the longest name wins. Under `expert_parallel` the experts of a module (`experts.3.` in a name, or stacked
    along axis 0 of an array of three axes) go whole to device e * num_devices // E, and the rest is replicated. Under
    `tensor_parallel` gate and up projections are sharded on their output axis and down projections on their input axis,
    norms and routers are replicated; attention needs strategies that know its heads. A bias of a down
    projection is given to device 0 alone, so that the sum over devices adds it once.

    Args:
        weights: arrays or `Weight`s by name; a `Weight`'s own strategy serves where none is given.
        strategies: by name of a weight or module; all over one number of devices.

    Returns:
        One dict a device. An expert that lives elsewhere is not in it.

    Raises:
        ShardingError: a weight without a strategy, a strategy without a weight, several numbers of devices,
            missing experts, a part of a weight, or as `Weight.shard`.
    """
    mapping(weights, "weights is a mapping of names to arrays or Weights", ShardingError)
    held = {
        name: value if isinstance(value, Weight) else Weight(name, value) for name, value in weights.items()
    }
    cut_already = next((name for name, weight in held.items() if weight.is_shard), None)
    if cut_already is not None:
        raise ShardingError(
            f"{cut_already} is one device's part already and is not cut again: give the whole weight"
        )
    shapes = {name: weight.shape for name, weight in held.items()}
    own = {name: (weight.shape, weight.sharding_strategy) for name, weight in held.items()}
    for name in weights_of_scales(shapes):
        if own[name][1] is None and name not in strategies:  # cut as its weight is
            del own[name]
    chosen = with_scales(resolve_module(own, strategies), shapes)
    counts = {strategy.num_devices for strategy in chosen.values()}
    if len(counts) > 1:
        raise ShardingError(
            f"the strategies of one module are over one number of devices, got {sorted(counts)}: "
            + ", ".join(f"{name}: {s}" for name, s in list(chosen.items())[:4])
        )
    devices: list[dict[str, Weight]] = [{} for _ in range(*(counts or {0}))]
    for name, weight in held.items():
        cut = Weight(
            weight.name, weight.array, chosen[name], quantization=weight.quantization, scale=weight.scale,
            input_scale=weight.input_scale, bias=weight.bias,
        )  # fmt: skip
        rule = chosen[name].shard
        rule = rule.weight if isinstance(rule, ScalesOf) else rule
        try:
            parts = cut.shard()
        except ShardingError as error:
            raise type(error)(f"{name}: {error}") from error
        for index, part in enumerate(parts):
            if not isinstance(rule, Owned) or rule.owner == index:
                devices[index][name] = part
    return devices


def resolve_module(
    weights: Mapping[str, tuple[Sequence[int], ShardingStrategy | None]],
    strategies: Mapping[str, ShardingStrategy],
) -> dict[str, ShardingStrategy]:
    """Return the strategy of each weight, markers resolved."""
    rule = "strategies is a mapping of names of weights or modules to a ShardingStrategy"
    for given in mapping(strategies, rule, ShardingError).values():
        instance(given, ShardingStrategy, rule, ShardingError)
    found: dict[str, ShardingStrategy] = {}
    used: set[str] = set()
    bare: list[str] = []
    marked = any(
        s is not None and s.is_expert_parallel
        for s in (*strategies.values(), *(o for _, o in weights.values()))
    )
    experts = _expert_counts(weights) if marked else {}
    for name, (shape, own) in weights.items():
        key = _key(name, strategies)
        strategy = own if key is None else strategies[key]
        if key is not None:
            used.add(key)
        if strategy is None:
            bare.append(name)
            continue
        bias = weights.get(f"{name.removesuffix('weight')}bias", ((), None))[0]
        found[name] = _unmarked(name, tuple(shape), strategy, experts, tuple(bias))
    if bare:
        raise ShardingError(
            f"no strategy for {len(bare)} weights: {', '.join(bare[:5])}: name each, or the module above"
        )
    if unused := sorted(set(strategies) - used):
        raise ShardingError(f"strategies were given for {', '.join(unused[:5])}, which name no weight here")
    return found


def _expert_counts(names: Iterable[str]) -> dict[str, int]:
    """Return how many experts stand under each `...experts.`."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := _EXPERT.search(name):
            numbers.setdefault(name[: match.start(1)], set()).add(int(match[1]))
    for before, found in numbers.items():
        if len(found) <= max(found):
            missing = next(i for i, number in enumerate(sorted(found)) if i != number)
            raise ShardingError(
                f"{before}: expert {missing} of {max(found) + 1} is not there: give all experts of a module"
            )
    return {before: len(found) for before, found in numbers.items()}


def _key(name: str, strategies: Mapping[str, ShardingStrategy]) -> str | None:
    best = None
    at = name
    while best is None:
        if at in strategies:
            best = at
        elif not at:
            return None
        at = at.rpartition(".")[0]
    return best


def _unmarked(
    name: str, shape: tuple[int, ...], strategy: ShardingStrategy, experts: Mapping[str, int],
    bias: tuple[int, ...],
) -> ShardingStrategy:  # fmt: skip
    count = strategy.num_devices
    if strategy.is_expert_parallel:
        if match := _EXPERT.search(name):
            owner = int(match[1]) * count // experts[name[: match.start(1)]]
            return ShardingStrategy(count, Owned(owner))
        stacked = len(shape) > 2 or re.search(r"(?:^|\.)experts\.", name) is not None
        return ShardingStrategy(count, ExpertRange() if stacked else Replicate())
    if strategy.is_tensor_parallel:
        return ShardingStrategy(count, _by_name(name, shape, bias))
    return strategy


def _by_name(name: str, shape: tuple[int, ...], bias: tuple[int, ...]) -> Rule:
    """Return how tensor parallel cuts a weight, from its name: Megatron-LM's column and row parallel layers."""
    stem, _, last = name.rpartition(".")
    if last not in ("weight", "bias"):
        stem, last = name, "weight"

    def is_one(names: Sequence[str]) -> bool:
        return any(stem == n or stem.endswith(f".{n}") or (n in _WHOLE and stem.endswith(n)) for n in names)

    first = 1 if len(shape) == 3 or (last == "bias" and len(shape) == 2) else 0  # experts: stacked on axis 0
    cuts: list[tuple[Sequence[str], Callable[[], Rule], Callable[[], Rule]]] = [
        (_STACKED, lambda: GateUp(first), lambda: GateUp(first)),
        (_OUT, lambda: Axiswise(first) if first else Rowwise(), lambda: Axiswise(first)),
        (_IN, lambda: Axiswise(2) if first else Columnwise(), lambda: Owned(0)),
        (_WHOLE, Replicate, Replicate),
    ]
    for names, weight_rule, bias_rule in cuts:
        if not is_one(names) or (names is not _WHOLE and _ATTENTION.search(stem)):
            continue
        if names is not _WHOLE and bias[-1:] == shape[-1:] != shape[-2:-1]:
            raise ShardingError(
                f"tensor_parallel cuts weights [out, in], and {name} {list(shape)} with a bias of {bias[-1]} is "
                "[in, out]: give it a strategy by its own name (columnwise in place of rowwise, and the reverse)"
            )
        return bias_rule() if last == "bias" else weight_rule()
    raise ShardingError(
        f"tensor_parallel does not know how {name} of shape {shape} is cut: give it a strategy by its own name "
        "(attention: grouped_qkv, which knows its heads; what is whole everywhere: replicate)"
    )
