"""Checks of a rule file by itself, without sizes or tensors."""

from __future__ import annotations

from collections.abc import Sequence

from lowshard.errors import RulesError
from lowshard.rules.axis_rule import Rule
from lowshard.rules.finding import Finding, Mode, find
from lowshard.rules.rule_table import RuleTable

_MOST_FALLBACKS = 64  # rules of one name that later ones are compared with


def check_file(rules: RuleTable) -> tuple[Finding, ...]:
    """Return every finding about the file: its keys, and how its rules relate."""
    mode = rules.mode
    found = list(rules.findings)
    if not rules.logical_axis_rules and not any(f.code in ("rules-empty", "rules-form") for f in found):
        text = "there are no rules: everything is replicated"
        found.append(find("rules-empty", mode, text, rules.place("logical_axis_rules")))
    found.extend(_never_wins(rules.logical_axis_rules, mode))
    for layer in rules.extension.layers:
        found.extend(_never_wins(layer.rules, mode))
    found.extend(_context(rules))
    for axis in dict.fromkeys(a for dim in rules.data_sharding for a in dim if a not in rules.mesh_axes):
        where = rules.place("data_sharding")
        own = where is None or where.path == rules.source
        text = f"data_sharding names {axis!r}, which mesh_axes ({', '.join(rules.mesh_axes)}) lacks"
        text += "" if own else f"; {rules.source} does not set it, so the base's holds"
        code = "data-sharding-axis-absent" if own else "data-sharding-axis-inherited"
        found.append(find(code, mode, text, where, axis=axis))
    return tuple(found)


def _context(rules: RuleTable) -> list[Finding]:
    try:
        result = rules.context_sharding
    except RulesError as error:
        rule = rules.context_rule
        text = str(error).partition(": context_sharding")[2]
        text = f"context_sharding{text}"
        return [find("context-sharding-refused", rules.mode, text, rule=rule, axis=error.axis)]
    if rules.context_written is None:
        return []
    rule, where = rules.context_rule, rules.place("context_sharding")
    why = f"the first activation_length rule ({rule.where})" if rule else "no activation_length rule shards"
    if rules.context_written == result:
        text = f"context_sharding has no effect in a rule file; {why} gives the same, {result!r}"
        return [find("context-sharding-ignored", rules.mode, text, where)]
    text = (
        f"context_sharding says {rules.context_written!r}, but MaxText ignores it in a rule file: it is "
        f"{result!r} ({why})"
    )
    return [find("context-sharding-at-odds", rules.mode, text, where, axis=rules.context_written)]


def _never_wins(rules: Sequence[Rule], mode: Mode) -> list[Finding]:
    """Find rules after one of the same name that needs no other axis: if that is blocked, so are they."""
    found = []
    before: dict[str, list[Rule]] = {}
    for rule in rules:
        known = before.setdefault(rule.name, [])
        earlier = next((r for r in known if set(r.axes) <= set(rule.axes)), None)
        if earlier is not None:
            why = (
                "settles the dim without an axis"
                if not earlier.axes
                else "needs no axis that this one does not"
            )
            at = f" at {earlier.where}" if earlier.where else ""
            text = f"it can never win: rule {earlier}{at} comes first and {why}"
            found.append(find("rule-never-wins", mode, text, rule=rule))
        elif len(known) < _MOST_FALLBACKS:
            known.append(rule)
    return found
