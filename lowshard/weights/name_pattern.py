"""Name patterns: YAML files that say how the weights of a family of models are sharded, by name.

A file lists `rules`, each a `pattern` and a `strategy`, and perhaps the `model_types` it is for. In a pattern `*`
stands for one part of a name (no dot), `**` for anything, `{a,b}` for either. Scales of quantised weights stand in
no file: they follow their weight (`lowshard.weights.scale_rules`). A strategy is a name (rowwise, columnwise,
replicate, expert_parallel) or one with arguments, `{grouped_qkv: {section: q}}`; `heads` shards an axis between
query heads, whatever their size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lowshard.argument import as_shape, brief, instance, items, mapping, one_of, whole, wholes
from lowshard.argument import path as check_path
from lowshard.errors import CheckpointError, LowshardError, ShardingError
from lowshard.nearest import nearest
from lowshard.reading import parse_json, read_text, reader
from lowshard.weights.head import GroupedQKV, Segment
from lowshard.weights.module_weights import resolve_module
from lowshard.weights.scale_rules import aligned, weights_of_scales, why_none, with_scales
from lowshard.weights.sharding_strategy import ShardingStrategy

SHIPPED = ("llama", "qwen", "moe", "deepseek_v4", "gpt2", "neox", "bert")
Align = Literal["blocks"] | None
MOST_STARS = 8
"""Of a pattern: matching takes time that grows with their number."""
_FOLDER = Path(__file__).parent / "names"


@dataclass(frozen=True)
class Sizes:
    """What patterns must know of a model. `num_kv_heads` is `num_heads` where it is not given."""

    num_heads: int | None = None
    num_kv_heads: int | None = None
    weight_block: tuple[int, ...] = ()
    """Rows and columns of a block that shares a scale; () where nothing says it, and shapes tell."""

    def __post_init__(self) -> None:
        for heads in (self.num_heads, self.num_kv_heads):
            if heads is not None:
                whole(heads, "a model has 1 head or more", ShardingError, 1)
        rule = "the block of a quantised weight has extents of 1 or more"
        object.__setattr__(self, "weight_block", wholes(self.weight_block, rule, ShardingError, 1))

    @classmethod
    def from_config(cls, path: str | Path) -> Sizes:
        """Return the sizes in a Hugging Face config.json, or in the one that lies in a folder.

        Raises:
            CheckpointError: it cannot be read, or is not a JSON object.
        """
        file, config = read_config(path)
        inner = config.get("text_config", config)
        sizes = (
            {name: inner[k] for k, name in _HEADS.items() if k in inner} if isinstance(inner, dict) else inner
        )
        quantised = config.get("quantization_config")
        if isinstance(sizes, dict) and isinstance(quantised, dict) and quantised.get("weight_block_size"):
            sizes["weight_block_size"] = quantised["weight_block_size"]
        return _read_sizes(sizes, file)

    @classmethod
    def beside(cls, checkpoint: str) -> Sizes:
        """Return the sizes in the config.json of a folder, or beside a file; none where they cannot be read."""
        path = Path(checkpoint)
        with suppress(LowshardError):
            return cls.from_config(path if os.path.isdir(path) else path.with_name("config.json"))
        return cls()


_HEADS = {
    "n_head": "num_attention_heads",  # of GPT-2 and BLOOM
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
}


def read_config(path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the path of a config.json, which may lie in a folder, and the object in it."""
    file = check_path(path, "a model's config is a path of a file or folder", CheckpointError)
    file = file / "config.json" if os.path.isdir(file) else file
    config = parse_json(read_text(file, "model's config", CheckpointError), str(file), CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: a model's config is a JSON object, got {brief(config)}")
    return str(file), config


@reader("model's config", CheckpointError)
def _read_sizes(
    num_attention_heads: int | None = None, num_key_value_heads: int | None = None,
    weight_block_size: tuple[int, ...] = (),
) -> Sizes:  # fmt: skip
    return Sizes(num_attention_heads, num_key_value_heads, weight_block_size)


@dataclass(frozen=True)
class NameRule:
    """One line of a file: names that match `pattern` are sharded by `strategy`."""

    pattern: str
    strategy: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern as a regular expression."""
        out, depth = "", 0
        tokens = re.findall(r"\*\*|.", self.pattern, re.DOTALL)
        if sum(token in ("*", "**") for token in tokens) > MOST_STARS:
            raise ShardingError(f"a pattern has at most {MOST_STARS} stars, got {brief(self.pattern)}")
        for token in tokens:
            if token in ("*", "**"):
                out += "[^.]+" if token == "*" else ".*"
            elif token == "{":
                out, depth = out + "(?:", depth + 1
            elif token == "}" and depth:
                out, depth = out + ")", depth - 1
            elif token == "," and depth:
                out += "|"
            else:
                out += re.escape(token)
        if depth:
            raise ShardingError(f"pattern {self.pattern!r}: a '{{' is not closed")
        # `{model.,}`: an alternative may be empty
        return re.compile(out, re.DOTALL)

    def matches(self, name: str) -> bool:
        """Return whether the pattern is the whole name."""
        return self.expression.fullmatch(name) is not None


_SHAPE_RULE = NameRule("**.weight_shape", "replicate")


@dataclass(frozen=True)
class Matching:
    """Which rule each name has; names that have none, and names that have several."""

    rules: Mapping[str, NameRule]
    unmatched: tuple[str, ...]
    doubly: Mapping[str, tuple[str, ...]]
    """The patterns of each name that several rules match."""

    @property
    def is_complete(self) -> bool:
        """Whether every name has exactly one rule."""
        return not (self.unmatched or self.doubly)

    def check(self, where: str, notes: Mapping[str, str] | None = None, hint: str = "") -> None:
        """Raise ShardingError unless every name has exactly one rule; the text lists those that have not."""
        lines = [f"{name} matches no pattern{(notes or {}).get(name, '')}" for name in self.unmatched]
        lines += [f"{name} matches {' and '.join(patterns)}" for name, patterns in self.doubly.items()]
        if lines:
            more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise ShardingError(
                f"{where}: every name matches exactly one pattern, but {'; '.join(lines[:8])}{more}{hint}"
            )


@dataclass(frozen=True)
class NamePatterns:
    """The rules of one file."""

    where: str
    rules: tuple[NameRule, ...]
    sizes: tuple[str, ...] = ()
    """The sizes that its strategies need."""
    model_types: tuple[str, ...] = ()
    """The models that it is for, as `model_type` in their config.json calls them."""

    @classmethod
    def of_model(cls, path: str | Path) -> NamePatterns:
        """Return the shipped file for the `model_type` in a config.json, or in the one that lies in a folder.

        Raises:
            CheckpointError: it cannot be read, or is not a JSON object.
            ShardingError: no shipped file is for its model_type.
        """
        file, config = read_config(path)
        inner = config.get("text_config")
        asked = [of.get("model_type") for of in (config, inner) if isinstance(of, dict)]
        known = {model_type: name for name in SHIPPED for model_type in cls.load(name).model_types}
        for model_type in asked:
            if isinstance(model_type, str) and model_type in known:
                return replace(
                    cls.load(known[model_type]), where=f"{known[model_type]} (model_type {model_type})"
                )
        raise ShardingError(
            f"{file}: no name patterns come with lowshard for model_type {brief(asked[0])}: give --strategies, one of "
            f"{', '.join(SHIPPED)} whose names fit, or a file of your own{nearest(asked[0], known)}"
        )

    @classmethod
    def load(cls, source: str | Path) -> NamePatterns:
        """Return a shipped file by its name (llama, also llama.yaml; see `SHIPPED`), or a file of your own.

        Raises:
            CheckpointError: there is no such file, or it is not YAML.
            ShardingError: it is not of the form above.
        """
        path = check_path(source, "name patterns are a shipped name or the path of a file", CheckpointError)
        is_name = path.name == str(source) and path.name.removesuffix(".yaml") in SHIPPED
        if is_name and not os.path.isfile(path):
            path = _FOLDER / f"{path.name.removesuffix('.yaml')}.yaml"
        if not os.path.exists(path):
            hint = nearest(path.name.removesuffix(".yaml"), SHIPPED)
            raise CheckpointError(f"{source}: there is no such file; shipped are {', '.join(SHIPPED)}{hint}")
        return replace(_read.yaml(path, damaged=CheckpointError), where=str(source))

    def match(self, names: Iterable[str]) -> Matching:
        """Return which rule each name has."""
        rules, unmatched, doubly = {}, [], {}
        rule = "names are a sequence of texts, or a mapping by name"
        for name in (
            list(names) if isinstance(names, Mapping) else items(names, rule, ShardingError, any_order=True)
        ):
            instance(name, str, rule, ShardingError)
            # Of compressed-tensors: elements packed into integers, and the shape that they had.
            asked = name.removesuffix("_packed")
            rules_of = [_SHAPE_RULE] if name.endswith(".weight_shape") else self.rules
            found = [rule for rule in rules_of if rule.matches(name) or rule.matches(asked)]
            if not found:
                unmatched.append(name)
            elif len(found) > 1:
                doubly[name] = tuple(rule.pattern for rule in found)
            else:
                rules[name] = found[0]
        return Matching(rules, tuple(unmatched), doubly)

    def strategies(
        self, shapes: Mapping[str, tuple[int, ...]], num_devices: int, sizes: Sizes | None = None,
        align: Align = None,
    ) -> dict[str, ShardingStrategy]:  # fmt: skip
        """Return the strategy of each weight; scales of a weight, by name and shape, are sharded as it is.

        Args:
            shapes: by name.
            num_devices: devices each is sharded over.
            sizes: of the model, where the file needs them.
            align: "blocks" cuts between blocks that share a scale, in as equal parts as these allow (384 rows in
                blocks of 128 into 256 and 128), biases and unscaled weights of the same extent alike.

        Raises:
            ShardingError: names without a rule or with several (all are told), sizes that are missing, a shape
                that does not fit its rule, heads of keys of another size than those of queries, or a tensor that
                may be the scales of another one, by its shape, and has a rule that cuts it apart from that.
        """
        rule = "shapes is a mapping of names to shapes"
        shapes = {
            instance(name, str, "a tensor's name is text", ShardingError): as_shape(
                shape, f"the shape of {name} is its extents, each 0 or more", ShardingError
            )
            for name, shape in mapping(shapes, rule, ShardingError).items()
        }
        scales = weights_of_scales(shapes)
        names = [name for name in shapes if name not in scales]
        matching = self.match(names)
        if not matching.is_complete:
            fits = [other for other in SHIPPED if NamePatterns.load(other).match(names).is_complete]
            hint = f"; all match in the shipped {' and '.join(fits)}" if fits else ""
            matching.check(self.where, {name: why_none(name, shapes) for name in matching.unmatched}, hint)
        sizes = (
            Sizes() if sizes is None else instance(sizes, Sizes, "sizes is a Sizes or None", ShardingError)
        )
        one_of("blocks" if align is None else align, ("blocks",), "align", ShardingError)
        made: dict[str, ShardingStrategy] = {}
        for name, found in matching.rules.items():
            try:
                made[name] = _MAKERS[found.strategy](
                    num_devices, shapes[name], sizes, **dict(found.arguments)
                )
            except (IndexError, TypeError, ShardingError) as error:
                raise ShardingError(f"{self.where}: {name} {shapes[name]}: {error}") from error
        made = resolve_module({name: (shapes[name], None) for name in made}, made)
        _compare_heads(self.where, made, shapes)
        made = made if align is None else aligned(made, shapes, sizes.weight_block)
        return with_scales(made, shapes, sizes.weight_block)


@reader("rule of a file of name patterns", ShardingError)
def _read_rule(pattern: str, strategy: str | Mapping[str, Mapping[str, Any] | None]) -> NameRule:
    chosen = {strategy: None} if isinstance(strategy, str) else strategy
    if len(chosen) != 1 or not set(chosen) <= set(_MAKERS):
        raise ShardingError(
            f"{brief(pattern)}: a strategy is one of {', '.join(_MAKERS)}, with arguments as {{name: {{argument: "
            f"value}}}}, got {brief(strategy)}{nearest(next(iter(chosen), None), _MAKERS)}"
        )
    ((name, arguments),) = chosen.items()
    takes = [p for p in signature(_MAKERS[name]).parameters.values() if p.name not in ("k", "shape", "sizes")]
    needs, given = {p.name for p in takes if p.default is p.empty}, set(arguments or {})
    if not needs <= given <= {p.name for p in takes}:
        names = ", ".join(f"{p.name}{'' if p.name in needs else ' (may be left out)'}" for p in takes)
        raise ShardingError(
            f"{brief(pattern)}: {name} takes {names or 'no arguments'}, got {brief(dict(arguments or {}))}"
        )
    rule = NameRule(pattern, name, tuple((arguments or {}).items()))
    _ = rule.expression  # which says what is wrong with the pattern
    return rule


@reader("file of name patterns", ShardingError)
def _read(
    rules: tuple[NameRule, ...], sizes: tuple[str, ...] = (), model_types: tuple[str, ...] = ()
) -> NamePatterns:
    return NamePatterns("", rules, sizes, model_types)


def _heads(sizes: Sizes, extent: int, section: str) -> tuple[int, int, int]:
    if sizes.num_heads is None:
        raise ShardingError(
            "cuts between heads need their number: put the model's config.json beside the checkpoint, or pass "
            "Sizes(num_heads=..., num_kv_heads=...), on the command line --heads and --kv-heads"
        )
    kv = sizes.num_kv_heads or sizes.num_heads
    count = kv if section == "kv" else sizes.num_heads + (2 * kv if section == "qkv" else 0)
    if extent % count:
        raise ShardingError(f"an axis of {extent} does not hold {count} heads of one size")
    return sizes.num_heads, kv, extent // count


def _compare_heads(
    where: str, made: Mapping[str, ShardingStrategy], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ShardingError where a number of key-value heads is not the model's: it would cut within heads."""
    rules = {name: s.shard for name, s in made.items() if isinstance(s.shard, GroupedQKV)}
    queries = {rule.head_dim for rule in rules.values() if rule.section == "q"}
    for name, rule in rules.items():
        if rule.section == "kv" and queries and rule.head_dim not in queries:
            raise ShardingError(
                f"{where}: {name} {shapes[name]}: {rule.num_kv_heads} key-value heads would have {rule.head_dim} "
                f"elements each, those of queries have {' or '.join(map(str, sorted(queries)))}: give the model's "
                "num_kv_heads, on the command line --kv-heads"
            )


def _grouped(
    k: int,
    shape: tuple[int, ...],
    sizes: Sizes,
    section: Any = "qkv",
    axis: int = 0,
    few_kv: Any = "replicate",
) -> ShardingStrategy:
    heads, kv, head_dim = _heads(sizes, shape[axis], section)
    return ShardingStrategy.grouped_qkv(k, heads, kv, head_dim, few_kv=few_kv, section=section, axis=axis)


def _stacked(k: int, shape: tuple[int, ...], sizes: Sizes) -> ShardingStrategy:
    if sizes.num_kv_heads not in (None, sizes.num_heads):
        raise ShardingError(
            f"stacked_qkv is for as many key-value heads as query heads, this model has {sizes.num_kv_heads} and "
            f"{sizes.num_heads}: use grouped_qkv"
        )
    heads, _, head_dim = _heads(sizes, shape[0] // 3, "q")
    return ShardingStrategy.stacked_qkv(k, heads, head_dim)


def _segmented(
    k: int, shape: tuple[int, ...], sizes: Sizes, axis: int, segments: Iterable[Mapping[str, Any]]
) -> ShardingStrategy:
    return ShardingStrategy.segmented(k, axis, [Segment.of(s) for s in segments])


_MAKERS: dict[str, Any] = {
    "rowwise": lambda k, shape, sizes: ShardingStrategy.rowwise(k),
    "columnwise": lambda k, shape, sizes: ShardingStrategy.columnwise(k),
    "axiswise": lambda k, shape, sizes, axis: ShardingStrategy.axiswise(axis, k),
    "replicate": lambda k, shape, sizes: ShardingStrategy.replicate(k),
    "gate_up": lambda k, shape, sizes, axis=2, interleaved=False: ShardingStrategy.gate_up(
        k, axis, interleaved=interleaved
    ),
    "stacked_qkv": _stacked,
    "head_aware_columnwise": lambda k, shape, sizes: ShardingStrategy.head_aware_columnwise(
        k, _heads(sizes, shape[1], "q")[0], _heads(sizes, shape[1], "q")[2]
    ),
    "grouped_qkv": _grouped,
    "heads": lambda k, shape, sizes, axis=0: _grouped(k, shape, sizes, "q", axis),
    "segmented": _segmented,
    "expert_parallel": lambda k, shape, sizes: ShardingStrategy.expert_parallel(k),
    "tensor_parallel": lambda k, shape, sizes: ShardingStrategy.tensor_parallel(k),
}
