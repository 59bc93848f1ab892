"""Why a tensor is cut as it is: for each dim the rule that won, and what blocked those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lowshard.mesh import DeviceMesh
from lowshard.rules.axis_rule import Rule
from lowshard.rules.logical_tensor import checked_mesh, checked_shape
from lowshard.rules.resolution import Resolution
from lowshard.rules.rule_table import RuleTable


@dataclass(frozen=True)
class Explanation:
    """Every dim of a tensor; its text has a line for each dim, and for each axis that blocked a rule."""

    parameter: str | None
    shape: tuple[int, ...] | None
    mesh: DeviceMesh | None
    resolution: Resolution
    """The spec, and every rule that was tried."""

    def __str__(self) -> str:
        found, shape = self.resolution, self.shape or ()
        lines = [f"{self.parameter or 'a tensor'}{f' {list(shape)}' if shape else ''}"]
        for dim, (name, winner) in enumerate(zip(found.names, found.winners, strict=True)):
            blocked = [a for a in found.attempts if a.dim == dim and a.outcome == "blocked"]
            size = f" = {shape[dim]}" if dim < len(shape) else ""
            lines.append(f"  dim {dim} {name or '-'}{size}: {self._reason(name, winner, bool(blocked))}")
            for a in blocked:
                for b in a.blocks:
                    held = f"{b.axis} already serves {found.names[b.dim]!r} on dim {b.dim}, by rule {_placed(b.rule)}"
                    lines.append(f"    blocked: rule {_placed(a.rule)}: {held}")
        return "\n".join(lines)

    def _reason(self, name: str | None, winner: Rule | None, blocked: bool) -> str:
        if winner is None:
            why = f"every rule of {name!r} is blocked" if blocked else f"no rule is for {name!r}"
            return "stays whole" if name is None else f"stays whole: {why}"
        cut = f"cut by {' x '.join(winner.axes)}" if winner.axes else "stays whole"
        if self.mesh is not None and winner.axes and set(winner.axes) <= set(self.mesh.axis_names):
            cut += f" into {prod(map(self.mesh.axis_size, winner.axes))}"
        return f"{cut}: rule {_placed(winner)}"


def explain_names(
    rules: RuleTable,
    names: Sequence[str | None],
    shape: Sequence[int] | None = None,
    mesh: DeviceMesh | None = None,
    parameter: str | None = None,
) -> Explanation:
    """Return the explanation of a tensor's logical names."""
    mesh = None if mesh is None else checked_mesh(mesh)
    extents = None if shape is None else checked_shape(shape, "" if parameter is None else parameter)
    return Explanation(parameter, extents, mesh, rules.resolver(parameter).trace(names))


def _placed(rule: Rule) -> str:
    return f"{rule} ({rule.where})" if rule.where else str(rule)
