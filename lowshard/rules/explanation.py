"""Why a tensor is cut as it is: per dim the rule that won, the rules tried before it, what blocked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowshard.mesh import DeviceMesh
from lowshard.rules.axis_rule import Rule
from lowshard.rules.binding import fitting
from lowshard.rules.logical_tensor import checked_mesh, checked_shape
from lowshard.rules.resolution import Attempt, Block, LogicalNames, Spec
from lowshard.rules.rule_table import RuleTable


@dataclass(frozen=True)
class DimExplanation:
    """One dim of a tensor."""

    dim: int
    name: str | None
    extent: int | None
    winner: Rule | None
    tried: tuple[Attempt, ...]
    """The rules that were blocked, in file order."""
    passed_over: tuple[Rule, ...]
    """Rules of the name that came too late."""
    shards: int | None
    """Into how many parts the dim is cut; None without a mesh."""
    problem: str = ""
    """What the mesh or the shape makes impossible."""

    @property
    def reason(self) -> str:
        """One line: why the dim is cut as it is."""
        if self.name is None:
            return "has no logical name: it stays whole"
        if self.winner is not None:
            cut = f"cut by {' x '.join(self.winner.axes)}" if self.winner.axes else "stays whole"
            at = f" ({self.winner.where})" if self.winner.where else ""
            return f"{cut}: rule {self.winner}{at}"
        if self.tried:
            many = (
                f"all {len(self.tried)} rules of {self.name!r} are"
                if len(self.tried) > 1
                else "its one rule is"
            )
            return f"stays whole: {many} blocked"
        return f"stays whole: there is no rule for {self.name!r}"


@dataclass(frozen=True)
class Explanation:
    """Every dim of a tensor."""

    parameter: str | None
    names: LogicalNames
    spec: Spec
    dims: tuple[DimExplanation, ...]
    mesh: DeviceMesh | None = None

    @property
    def blocked(self) -> tuple[tuple[Rule, tuple[Block, ...]], ...]:
        """Every rule that was blocked, with the axes that blocked it and who held them."""
        return tuple((a.rule, a.blocks) for d in self.dims for a in d.tried)

    def __str__(self) -> str:
        shape = [str(d.extent) for d in self.dims if d.extent is not None]
        head = self.parameter or "a tensor"
        lines = [f"{head} [{', '.join(shape)}]" if shape else head]
        for d in self.dims:
            size = f" = {d.extent}" if d.extent is not None else ""
            lines.append(f"  dim {d.dim} {d.name or '-'}{size}: {d.reason}")
            for attempt in d.tried:
                for b in attempt.blocks:
                    held = f"{self.names[b.dim]!r} on dim {b.dim}"
                    by = f"rule {b.rule}{f' ({b.rule.where})' if b.rule.where else ''}"
                    at = f" ({attempt.rule.where})" if attempt.rule.where else ""
                    lines.append(
                        f"    blocked: rule {attempt.rule}{at}: {b.axis} already serves {held}, by {by}"
                    )
            for rule in d.passed_over:
                at = f" ({rule.where})" if rule.where else ""
                lines.append(f"    too late: rule {rule}{at}")
            if d.shards is not None and d.extent is not None and d.winner is not None and d.winner.axes:
                lines.append(f"    {d.shards} part{'s' * (d.shards != 1)} of {-(-d.extent // d.shards)}")
            if d.problem:
                lines.append(f"    PROBLEM: {d.problem}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "parameter": self.parameter,
            "names": list(self.names),
            "spec": [list(e) if isinstance(e, tuple) else e for e in self.spec],
            "dims": [
                {
                    "dim": d.dim,
                    "name": d.name,
                    "extent": d.extent,
                    "shards": d.shards,
                    "reason": d.reason,
                    "problem": d.problem or None,
                    "winner": None if d.winner is None else d.winner.to_json(),
                    "blocked": [
                        a.rule.to_json()
                        | {
                            "blocked_by": [
                                {"axis": b.axis, "dim": b.dim, "rule": b.rule.to_json()} for b in a.blocks
                            ]
                        }
                        for a in d.tried
                    ],
                    "too_late": [r.to_json() for r in d.passed_over],
                }
                for d in self.dims
            ],
        }


def explain_names(
    rules: RuleTable,
    names: Sequence[str | None],
    shape: Sequence[int] | None = None,
    mesh: DeviceMesh | None = None,
    parameter: str | None = None,
) -> Explanation:
    """Return the explanation of a tensor's logical names.

    Raises:
        RulesError: a name on two dims, or a winning rule whose target no spec can hold.
    """
    mesh = None if mesh is None else checked_mesh(mesh)
    shape = None if shape is None else checked_shape(shape, "" if parameter is None else parameter)
    found = rules.resolver(parameter).trace(names)
    dims = []
    for dim, name in enumerate(found.names):
        winner = found.winners[dim]
        mine = [a for a in found.attempts if a.dim == dim]
        extent = shape[dim] if shape is not None and dim < len(shape) else None
        shards, problem = None, ""
        if mesh is not None:
            shards, problem = _bound(winner, mesh, extent)
        if shape is not None and dim >= len(shape):
            problem = f"the tensor has {len(shape)} dims only"
        tried = tuple(a for a in mine if a.outcome == "blocked")
        late = tuple(a.rule for a in mine if a.outcome == "too late")
        dims.append(DimExplanation(dim, name, extent, winner, tried, late, shards, problem))
    beyond = range(len(found.names), len(shape)) if shape is not None else ()
    whole = 1 if mesh is not None else None
    dims.extend(DimExplanation(d, None, shape[d] if shape else None, None, (), (), whole) for d in beyond)
    return Explanation(parameter, found.names, found.spec, tuple(dims), mesh)


def _bound(rule: Rule | None, mesh: DeviceMesh, extent: int | None) -> tuple[int | None, str]:
    if rule is None:
        return 1, ""
    absent = [a for a in rule.axes if a not in mesh.axis_names]
    if absent:
        return None, f"the mesh ({mesh}) has no axis {', '.join(map(repr, absent))}"
    if rule.repeated_axis:
        return None, f"the rule names {rule.repeated_axis!r} twice"
    shards = prod(mesh.axis_size(a) for a in rule.axes)
    if extent is not None and extent % shards:
        return shards, f"{shards} shards do not divide {extent}; {fitting(rule, mesh, extent)}"
    return shards, ""
