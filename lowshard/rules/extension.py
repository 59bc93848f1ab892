"""The `lowshard:` key of a rule file: what MaxText's own keys cannot say.

    lowshard:
      memory_budget_bytes_per_device: 80e9
      layers:                               # another set of rules for some parameters
        - match: "*MoeBlock*"
          logical_axis_rules:
            - [embed, [fsdp]]
          replace: false                    # true: only these rules; false: these, then the file's others
      parameters:                           # names in a plain checkpoint -> logical axes
        - ["*.q_proj.weight", [q_heads, embed]]

Patterns match whole names; `*` stands for any characters, dots and slashes included, `?` for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowshard.argument import quoted
from lowshard.bounded import bounded_cache
from lowshard.document import Node, Where
from lowshard.rules.axis_rule import Rule, read_map
from lowshard.rules.finding import Finding, Mode, find

ReadRules = Callable[[Node, Mode, list[Finding]], tuple[Rule, ...]]

_KEYS = ("memory_budget_bytes_per_device", "layers", "parameters")


@dataclass(frozen=True, slots=True)
class LayerRules:
    """Rules for the parameters whose name matches; they come before the file's own."""

    match: str
    rules: tuple[Rule, ...]
    replace: bool = False
    """True: the file's own rules do not apply there. False: those of other names do, behind these."""
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class ParameterPattern:
    """The logical names of the parameters whose name matches, one a dim; None: a dim that stays whole."""

    match: str
    names: tuple[str | None, ...]
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """What stands below the `lowshard:` key."""

    memory_budget_bytes_per_device: float | None = None
    layers: tuple[LayerRules, ...] = ()
    parameters: tuple[ParameterPattern, ...] | None = None


def matches(pattern: str, name: str) -> bool:
    """Return whether a whole name matches; `*` is any run of characters, `?` any one."""
    return _compiled(pattern).match(name) is not None


@bounded_cache(1 << 20)
def _compiled(pattern: str) -> re.Pattern[str]:
    # Each part between stars is sought once, as early as it comes: an atomic group keeps the match linear.
    pattern = re.sub(r"\*+", "*", pattern)
    first, *rest = (re.escape(part).replace(r"\?", ".") for part in pattern.split("*"))
    if not rest:
        return re.compile(f"{first}\\Z", re.DOTALL)
    middle = "".join(f"(?>.*?{part})" for part in rest[:-1])
    return re.compile(f"{first}{middle}.*{rest[-1]}\\Z", re.DOTALL)


def read_extension(node: Node, mode: Mode, findings: list[Finding], read_rules: ReadRules) -> Extension:
    """Return what the node says; adds what is wrong with it to `findings`."""

    def wrong(text: str, where: Where) -> None:
        findings.append(find("extension-form", mode, text, where))

    if node.kind == "null":
        return Extension()
    if node.kind != "map":
        wrong(f"lowshard is a map with the keys {', '.join(_KEYS)}, got {node}", node.where)
        return Extension()
    entries = read_map(node)
    for key, (key_node, _) in entries.items():
        if key not in _KEYS:
            wrong(f"below lowshard the keys are {', '.join(_KEYS)}, got {quoted(key)}", key_node.where)
    values = {k: v for k, (_, v) in entries.items()}
    budget, layers, parameters = None, [], None
    if "memory_budget_bytes_per_device" in values:
        given = values["memory_budget_bytes_per_device"]
        budget = _number(given)
        if budget is None:
            wrong(
                f"memory_budget_bytes_per_device is a number > 0, below 2^63, such as 80e9, got {given}",
                given.where,
            )
    if "layers" in values:
        given = values["layers"]
        if given.kind != "list":
            wrong(f"layers is a list of {{match, logical_axis_rules}}, got {given}", given.where)
        for item in given.items:
            layer = _layer(item, mode, findings, read_rules, wrong)
            if layer is not None:
                layers.append(layer)
    if "parameters" in values:
        parameters = _parameters(values["parameters"], wrong)
    return Extension(budget, tuple(layers), parameters)


def _layer(
    node: Node,
    mode: Mode,
    findings: list[Finding],
    read_rules: ReadRules,
    wrong: Callable[[str, Where], None],
) -> LayerRules | None:
    form = "an entry of layers is {match: PATTERN, logical_axis_rules: [...], replace: false}"
    entries = {k: v for k, (_, v) in read_map(node).items()} if node.kind == "map" else {}
    unknown = set(entries) - {"match", "logical_axis_rules", "replace"}
    match, replace = entries.get("match"), entries.get("replace")
    if unknown or match is None or "logical_axis_rules" not in entries or match.kind != "text":
        wrong(f"{form}, got {node}", node.where)
        return None
    if replace is not None and replace.kind != "bool":
        wrong(f"{form}: replace is true or false, got {replace}", replace.where)
        return None
    rules = read_rules(entries["logical_axis_rules"], mode, findings)
    return LayerRules(match.text, rules, replace is not None and replace.value, node.where)


def _parameters(node: Node, wrong: Callable[[str, Where], None]) -> tuple[ParameterPattern, ...]:
    form = "parameters is a list of [PATTERN, [logical name or null, one for each dim]]"
    if node.kind != "list":
        wrong(f"{form}, got {node}", node.where)
    found = []
    for item in node.items:
        pattern = item.items[0] if item.kind == "list" and len(item.items) == 2 else None
        names = item.items[1] if pattern is not None else None
        if (
            pattern is None
            or names is None
            or pattern.kind != "text"
            or names.kind != "list"
            or not all(n.kind in ("text", "null") for n in names.items)
        ):
            wrong(f"{form}, got {item}", item.where)
            continue
        logical = tuple(n.text if n.kind == "text" else None for n in names.items)
        found.append(ParameterPattern(pattern.text, logical, item.where))
    return tuple(found)


def _number(node: Node) -> float | None:
    # 80e9 is text in YAML 1.1, which wants 80.0e+9: both are read.
    if node.kind not in ("int", "float", "text") or len(node.text) > 40:
        return None
    try:
        number = float(node.value)
    except ValueError:
        return None
    return (int(number) if number.is_integer() else number) if 0 < number < 1 << 63 else None
