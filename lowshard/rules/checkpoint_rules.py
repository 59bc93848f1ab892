"""Rules for a plain checkpoint: logical names from parameter names, layouts, units for FSDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files

from lowshard.argument import brief, instance, items, mapping, truth
from lowshard.box import Split
from lowshard.errors import RulesError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.rules.extension import ParameterPattern, matches
from lowshard.rules.finding import Finding, find
from lowshard.rules.logical_tensor import LogicalTensor, as_tensors, checked_shape
from lowshard.rules.resolution import entry_axes
from lowshard.rules.rules_check import SPLIT_OFF
from lowshard.rules.ruleset import RuleSet
from lowshard.rules.schema import parse_rule_file

# The number of a layer, and everything before it; else everything before the last part.
_UNIT = re.compile(r"(?P<unit>.*?(?:\A|[./])\d+)(?:[./])(?P<rest>.+)\Z", re.DOTALL)


def name_tensors(
    rules: RuleSet, shapes: Mapping[str, tuple[Sequence[int], object]]
) -> tuple[tuple[LogicalTensor, ...], list[Finding]]:
    """Return the tensors of a checkpoint with their logical names, and a finding for those without any.

    A name takes the first of the file's `lowshard: parameters` that matches it and has as many names as
    the tensor has dims; without that key, the ready-made patterns for the names that Hugging Face
    checkpoints use; where no rule is for a newer name of MaxText's (`embed_attn`), the older one (`embed`) is taken.
    Tensors that no pattern matches stay whole on every device.

    Args:
        rules: the rule set.
        shapes: (shape, dtype) by parameter name.

    Raises:
        RulesError: an invalid shape.
        DTypeError: an unknown dtype.
    """
    _need_rules(rules)
    given = rules.extension.parameters
    patterns = given if given is not None else ready_made_patterns()
    tensors: list[LogicalTensor] = []
    unmatched: list[str] = []
    rule = "shapes is a mapping of a parameter's name to its shape and dtype"
    for name, both in mapping(shapes, rule, RulesError).items():
        instance(name, str, rule, RulesError)
        pair = items(both, rule, RulesError)
        if len(pair) != 2:
            raise RulesError(f"{rule}; {name} has {brief(both)}")
        shape, dtype = pair
        extents = checked_shape(shape, name)
        fitting = (p for p in patterns if len(p.names) == len(extents) and matches(p.match, name))
        pattern = next(fitting, None)
        if pattern is None and extents:
            unmatched.append(name)
        names = pattern.names if pattern is not None else (None,) * len(extents)
        if given is None:
            held = rules.resolver(name)
            names = tuple(SPLIT_OFF[n] if n and n in SPLIT_OFF and not held.rules_of(n) else n for n in names)
        tensors.extend(as_tensors({name: (names, extents, dtype)}))
    if not unmatched:
        return tuple(tensors), []
    shown = ", ".join(unmatched[:3]) + (f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else "")
    text = (
        f"no pattern gives {len(unmatched)} of {len(tensors)} tensors logical names, so they are replicated: {shown}; "
        "write lowshard: {parameters: [[PATTERN, [name, ...]]]} in the rule file"
    )
    return tuple(tensors), [
        find("tensor-unmatched", rules.mode, text, rules.place("lowshard"), tensors=unmatched)
    ]


@cache
def ready_made_patterns() -> tuple[ParameterPattern, ...]:
    """Return the patterns for parameter names of Hugging Face checkpoints."""
    path = files("lowshard.rules").joinpath("ready", "checkpoint-names.yml")
    made = parse_rule_file(path.read_text(encoding="utf-8"), str(path), "strict")
    return made.extension.parameters or ()


def tensor_layouts(
    rules: RuleSet,
    mesh: DeviceMesh,
    tensors: object,
    *,
    dtype: object = "float32",
    uneven: bool = False,
    split: Split = "balanced",
) -> dict[str, Layout]:
    """Return the layout of every tensor by name; equal ones are one object.

    Args:
        rules: the rule set.
        mesh: the mesh.
        tensors: as for `RuleSet.check`; for a checkpoint, what `name_tensors` gives.
        dtype: of tensors that do not say theirs.
        uneven: allow dims that their axes do not divide.
        split: how those are split.

    Raises:
        RulesError: as `RuleSet.layout`.
    """
    _need_rules(rules)
    uneven = truth(uneven, "uneven is True or False", RulesError)
    known: dict[tuple[object, ...], Layout] = {}
    # One layout for each list of names and rank, with the number of shards of each dim: a model has few of them.
    first: dict[tuple[object, ...], tuple[Layout, tuple[int, ...]]] = {}
    out: dict[str, Layout] = {}
    for tensor in as_tensors(tensors, dtype):
        how = (id(rules.resolver(tensor.name)), tensor.names, len(tensor.shape), tensor.dtype)
        layout = known.get((how, tensor.shape))
        if layout is None:
            model, parts = first.get(how, (None, ()))
            fits = uneven or all(n % k == 0 for n, k in zip(tensor.shape, parts, strict=False))
            if model is not None and fits:
                layout = model.with_shape(tensor.shape)
            else:
                layout = rules.layout(
                    mesh,
                    tensor.names,
                    tensor.shape,
                    tensor.dtype,
                    parameter=tensor.name,
                    uneven=uneven,
                    split=split,
                )
                first[how] = (layout, tuple(mesh.axis_size(entry_axes(e)) for e in layout.spec))
            known[how, tensor.shape] = layout
        out[tensor.name] = layout
    return out


def checkpoint_layouts(
    rules: RuleSet,
    mesh: DeviceMesh,
    shapes: Mapping[str, tuple[Sequence[int], object]],
    *,
    uneven: bool = True,
    split: Split = "balanced",
) -> dict[str, Layout]:
    """Return the layout of every tensor of a plain checkpoint: names by pattern, then rules, then the mesh.

    The two halves are `name_tensors`, which also says what no pattern matches, and `tensor_layouts`.

    Args:
        rules: the rule set.
        mesh: the mesh.
        shapes: (shape, dtype) by parameter name; of a `lowshard.checkpoint.Header`,
            `{name: (entry.shape, entry.dtype) for name, entry in header.tensors.items()}`.
        uneven: allow dims that their axes do not divide.
        split: how those are split.

    Raises:
        RulesError: as `RuleSet.layout`.
    """
    tensors, _ = name_tensors(rules, shapes)
    return tensor_layouts(rules, mesh, tensors, uneven=uneven, split=split)


def unit_layouts(
    layouts: Mapping[str, Layout], unit_of: Callable[[str], tuple[str, str]] | None = None
) -> dict[str, dict[str, Layout]]:
    """Return layouts by FSDP unit and, in it, by parameter.

    unit_of: a name to (unit, parameter); None: a unit a layer (`model.layers.3` of
    `model.layers.3.mlp.up_proj.weight`), and one for each module outside the layers.
    """
    if unit_of is not None and not callable(unit_of):
        raise RulesError(
            f"unit_of is a function of a name that returns (unit, parameter), or None, got {brief(unit_of)}"
        )
    units: dict[str, dict[str, Layout]] = {}
    rule = "layouts is a mapping of names to layouts"
    for name, layout in mapping(layouts, rule, RulesError).items():
        found = (unit_of or split_unit)(instance(name, str, rule, RulesError))
        if not isinstance(found, tuple) or len(found) != 2:
            raise RulesError(f"unit_of returns (unit, parameter), for {name} it gave {brief(found)}")
        unit, parameter = found
        units.setdefault(unit, {})[parameter] = instance(layout, Layout, rule, RulesError)
    return units


def _need_rules(rules: object) -> None:
    instance(rules, RuleSet, "rules is a RuleSet, as load_rules returns it", RulesError)


def split_unit(name: str) -> tuple[str, str]:
    """Return (unit, parameter) of a parameter name: a layer and the rest, or all parts and the last."""
    match = _UNIT.match(name)
    if match is not None:
        return match["unit"], match["rest"]
    parts = re.split(r"[./]", name)
    last = parts[-1]
    return (name[: -len(last) - 1], last) if len(parts) > 1 else (name, name)
