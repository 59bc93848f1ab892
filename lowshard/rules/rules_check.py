"""The check of a whole configuration: the file, the requested sizes, every tensor.

Findings raise nothing, and only names, shapes and sizes are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, prod
from typing import Any

from lowshard import dtypes
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.nearest import nearest
from lowshard.rules.axis_rule import Rule
from lowshard.rules.binding import fitting, largest_divisor, shards_text
from lowshard.rules.file_check import check_file
from lowshard.rules.finding import CheckReport, Finding, find
from lowshard.rules.logical_tensor import LogicalTensor, as_tensors, group_name
from lowshard.rules.resolution import Resolution, entry_axes
from lowshard.rules.rule_table import RuleTable
from lowshard.rules.topology import SizeRequest

# Logical names that only ever stand on what flows or is cached, never on a weight.
_NO_WEIGHT = (
    "activation",
    "prefill_activation",
    "decode_",
    "cache_",
    "paged_",
    "num_pages",
    "tokens_per_page",
)
_NAMED = 3
SPLIT_OFF = {"embed_attn": "embed", "embed_router": "embed_moe", "embed_shared": "embed", "mlp_shared": "mlp"}
"""Logical names that MaxText has gained since August 2026, for attention, the router and shared experts, and the name
that their dims had before. Source: MaxText's pull request 5007 and its base.yml at commit 2b68d4e."""


def check_rules(
    rules: RuleTable,
    tensors: object = None,
    *,
    activations: object = None,
    mesh: DeviceMesh | None = None,
    request: SizeRequest | None = None,
    dtype: object = "float32",
) -> CheckReport:
    """Return every finding; see `RuleSet.check`."""
    findings: list[Finding] = list(check_file(rules))
    if tensors is None:  # else the names that are in use are known
        findings += _split_off(rules)
    if mesh is None and request is not None:
        rules, edits = rules.pipelined(request)
        topology, found = rules.topology(request)
        findings += edits + found
        if topology is not None:
            mesh = topology.mesh(rules.extension.memory_budget_bytes_per_device)
    weights = as_tensors(tensors, dtype) if tensors is not None else ()
    check = _Check(rules, mesh)
    for tensor in weights:
        check.look_at(tensor, weight=True)
    for tensor in as_tensors(activations) if activations is not None else ():
        check.look_at(tensor, weight=False)
    findings += check.findings(with_tensors=tensors is not None)
    if mesh is not None and weights and mesh.memory_budget_bytes_per_device is not None:
        findings += _budget(rules, mesh, weights, findings)
    return CheckReport.of(findings)


class _Check:
    """Checks tensors one by one and collects, for each finding, its tensors."""

    def __init__(self, rules: RuleTable, mesh: DeviceMesh | None) -> None:
        self._rules = rules
        self._mesh = mesh
        self._axes = mesh.axis_names if mesh is not None else rules.mesh_axes
        self._known: dict[object, Resolution | None] = {}
        self._facts: dict[tuple[str, tuple[Any, ...]], list[str]] = {}
        self._blocked: dict[tuple[Rule, Rule, str, Rule | None, str | None], list[str]] = {}
        self._extents: dict[tuple[Rule, int], list[str]] = {}
        self._errors: dict[str, tuple[RulesError, str, list[str]]] = {}

    def look_at(self, tensor: LogicalTensor, *, weight: bool) -> None:
        resolver = self._rules.resolver(tensor.name if weight else None)
        key = (id(resolver), tensor.names)
        if key not in self._known:
            try:
                self._known[key] = resolver.trace(tensor.names)
            except RulesError as error:
                code = "name-twice" if "two dims" in str(error) else "target-form"
                self._errors[str(error)] = (error, code, [])
                self._known[key] = None
        found = self._known[key]
        if found is None:
            try:
                resolver.trace(tensor.names)
            except RulesError as error:
                self._errors[str(error)][2].append(tensor.name)
            return
        if len(found.names) > len(tensor.shape) and weight:
            self._add(tensor, "names-beyond-rank", len(tensor.shape), found.names)
        for dim, (name, rule) in enumerate(zip(found.names, found.winners, strict=True)):
            if rule is None and name is not None and not resolver.rules_of(name):
                self._add(tensor, "name-without-rule", name)
            if rule is None or not rule.axes:
                continue
            absent = [a for a in rule.axes if a not in self._axes]
            if absent:
                self._add(tensor, "axis-absent-weight" if weight else "axis-absent-other", rule, absent[0])
            elif rule.repeated_axis and weight:
                self._add(tensor, "target-repeats-axis", rule)
            elif weight and self._mesh is not None and dim < len(tensor.shape):
                self._extents.setdefault((rule, tensor.shape[dim]), []).append(tensor.name)
        for attempt in found.attempts:
            if attempt.outcome == "blocked":
                block = attempt.blocks[0]
                why = (block.axis, found.winners[attempt.dim], found.names[block.dim])
                self._blocked.setdefault((attempt.rule, block.rule, *why), []).append(tensor.name)

    def _add(self, tensor: LogicalTensor, code: str, *about: object) -> None:
        self._facts.setdefault((code, about), []).append(tensor.name)

    def findings(self, *, with_tensors: bool) -> list[Finding]:
        """Return what was found, one finding a fact."""
        return [
            *self._error_findings(),
            *self._fact_findings(),
            *self._absent_elsewhere(with_tensors),
            *self._blocked_findings(),
            *self._extent_findings(),
        ]

    def _error_findings(self) -> Iterable[Finding]:
        for error, code, names in self._errors.values():
            rule = next((r for r in self._rules.logical_axis_rules if str(r) == error.rule), None)
            text = str(error).rpartition(f"rule {error.rule}: ")[2]
            found = find(code, "strict", f"{text} ({_listed(names)})", rule=rule, tensors=names)
            yield found

    def _fact_findings(self) -> Iterable[Finding]:
        mode = self._rules.mode
        for (code, about), names in self._facts.items():
            listed = _listed(names)
            if code == "names-beyond-rank":
                text = f"{about[0]} dims, but logical names {list(about[1])}: {listed}"
                yield find(code, mode, text, tensors=names)
            elif code == "name-without-rule":
                name = str(about[0])
                text = (
                    f"no rule is for the logical name {name!r}: it is replicated, without a word ({listed})"
                )
                if (
                    name not in SPLIT_OFF
                ):  # a name of more or fewer parts is another: head_dim is no misspelt heads
                    known = (r.name for r in self._rules.logical_axis_rules)
                    text += nearest(name, (k for k in known if k.count("_") == name.count("_")))
                elif add := _as_before(self._rules, name):
                    text += f"; to shard it as {SPLIT_OFF[name]!r} was, add {add}"
                yield find(code, mode, text, self._rules.place("logical_axis_rules"), tensors=names)
            elif code == "target-repeats-axis":
                rule: Rule = about[0]
                text = f"the target names the axis {rule.repeated_axis!r} twice and settles a dim of {listed}"
                yield find(code, "strict", text, rule=rule, axis=rule.repeated_axis, tensors=names)
            else:
                rule, axis = about
                what = "an error for weights" if code == "axis-absent-weight" else "dropped without a word"
                text = f"the mesh ({', '.join(self._axes)}) has no axis {axis!r}: {what} ({listed})"
                yield find(code, mode, text, rule=rule, axis=str(axis), tensors=names)

    def _absent_elsewhere(self, with_tensors: bool) -> Iterable[Finding]:
        reported = {about[0] for (code, about) in self._facts if code.startswith("axis-absent")}
        layers = [r for layer in self._rules.extension.layers for r in layer.rules]
        for rule in (*self._rules.logical_axis_rules, *layers):
            absent = [a for a in rule.axes if a not in self._axes]
            if not absent or rule in reported:
                continue
            text = f"the mesh ({', '.join(self._axes)}) has no axis {', '.join(map(repr, absent))}: "
            if with_tensors or rule.name.startswith(_NO_WEIGHT):
                text += (
                    "an activation drops it without a word, a weight would fail (no weight here comes to it)"
                )
                code = "axis-absent-other"
            else:
                text += "a weight that comes to this rule fails"
                code = "axis-absent-perhaps-weight"
            yield find(code, self._rules.mode, text, rule=rule, axis=absent[0])

    def _blocked_findings(self) -> Iterable[Finding]:
        for (rule, holder, axis, winner, name), names in self._blocked.items():
            at = f" at {holder.where}" if holder.where else ""
            if winner is None:
                code, then = "name-all-blocked", "no other rule fits, the dim is replicated without a word"
            else:
                code, then = "name-fell-back", f"rule {winner} takes its place"
            text = f"it is blocked: {axis} serves {name!r} by rule {holder}{at}; {then} ({_listed(names)})"
            yield find(code, self._rules.mode, text, rule=rule, axis=axis, tensors=names)

    def _extent_findings(self) -> Iterable[Finding]:
        mesh = self._mesh
        if mesh is None:
            return
        bad = [(r, n, t) for (r, n), t in self._extents.items() if n % mesh.axis_size(r.axes)]
        for rule, extent, names in bad:
            axis = max(rule.axes, key=mesh.axis_size)
            overall = [
                f"{a}={n}"
                for a in rule.axes
                if mesh.axis_size(a) > 1 and (n := self._largest(mesh, a)) is not None
            ]
            rest = f"; for all tensors together: {' or '.join(overall)}" if overall else ""
            text = (
                f"a dim {rule.name} of {extent} is not divided by {shards_text(rule, mesh)} "
                f"({_listed(names)}); {fitting(rule, mesh, extent)}{rest}"
            )
            yield find("dim-indivisible", self._rules.mode, text, rule=rule, axis=axis, tensors=names)

    def _largest(self, mesh: DeviceMesh, axis: str) -> int | None:
        """Return the largest size of an axis, up to its own, that divides every tensor; None if there is none."""
        common = 0
        for rule, extent in self._extents:
            rest = mesh.axis_size([a for a in rule.axes if a != axis])
            if extent % rest:
                return None
            if axis in rule.axes:
                common = gcd(common, extent // rest)
        return largest_divisor(common, mesh.axis_size(axis)) if common else mesh.axis_size(axis)


def _split_off(rules: RuleTable) -> list[Finding]:
    """Find names of newer MaxText versions that no rule is for, though one is for the name they were split from."""
    known = {rule.name for rule in rules.logical_axis_rules}
    lacking = {name: add for name in SPLIT_OFF if name not in known and (add := _as_before(rules, name))}
    if not lacking:
        return []
    names = ", ".join(f"{name!r} ({SPLIT_OFF[name]!r} before)" for name in lacking)
    rules_to_add = ", ".join(lacking.values())
    text = (
        f"no rule is for {names}, which newer versions of MaxText ask for on weights of attention, the router or "
        f"shared experts: they would be replicated, without a word; to shard them as before, add {rules_to_add}"
    )
    return [find("name-split-off", rules.mode, text, rules.place("logical_axis_rules"))]


def _as_before(rules: RuleTable, name: str) -> str:
    """Return the rules that shard a name that was split from another as that one is, as text."""
    source = SPLIT_OFF[name]
    if name == "embed_router" and all(r.name != source for r in rules.logical_axis_rules):
        source = "embed"  # from which embed_moe was split before
    before = [r for r in rules.logical_axis_rules if r.name == source]
    if not any(r.axes for r in before):
        return ""
    return ", ".join(f"[{name}, [{', '.join(r.axes)}]]" for r in before)


def _budget(
    rules: RuleTable, mesh: DeviceMesh, weights: tuple[LogicalTensor, ...], findings: list[Finding]
) -> list[Finding]:
    if any(f.severity == "error" and f.tensors for f in findings):
        return []
    # The largest shard of each; parameters alone stand for themselves, their gradients and two moments.
    copies = 2 if any(t.role == "moment" for t in weights) else 4
    needed = 0
    for tensor in weights:
        spec = rules.bound_spec(mesh, tensor.names, tensor.shape, parameter=tensor.name, uneven=True).spec
        parts = [mesh.axis_size(entry_axes(e)) for e in spec] + [1] * (len(tensor.shape) - len(spec))
        held = prod(-(-n // k) for n, k in zip(tensor.shape, parts, strict=True))
        times = copies if tensor.role == "parameter" else 1
        needed += times * held * dtypes.get(tensor.dtype).itemsize_bytes
    budget = mesh.smallest_budget_bytes
    if budget is None or needed <= budget:
        return []
    text = f"a device needs {needed / 1e9:.3f} GB (parameters, gradients, moments), its budget is {budget / 1e9:.3f} GB"
    return [find("memory-budget", rules.mode, text, rules.place("lowshard"))]


def _listed(names: list[str]) -> str:
    """Return how many tensors there are and some of their names, layers and moments counted as one."""
    groups = list(dict.fromkeys(map(group_name, names)))
    shown = ", ".join(groups[:_NAMED])
    more = f" and {len(groups) - _NAMED} more names" if len(groups) > _NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}: {shown}{more}"
