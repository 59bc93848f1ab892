"""RuleSet: the rules of one configuration, with check and explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.rules.axis_rule import Rule
from lowshard.rules.file_check import check_file
from lowshard.rules.finding import CheckReport, Finding
from lowshard.rules.logical_tensor import checked_mesh, checked_shape
from lowshard.rules.resolution import Resolution
from lowshard.rules.rule_table import RuleTable
from lowshard.rules.rules_check import check_rules
from lowshard.rules.topology import SizeRequest, Sizes


@dataclass(frozen=True)
class Explanation:
    """Why a tensor is sharded as it is: a line for each dim, and for each axis that blocked a rule."""

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
        sharding = f"sharded over {' x '.join(winner.axes)}" if winner.axes else "stays whole"
        if self.mesh is not None and winner.axes and set(winner.axes) <= set(self.mesh.axis_names):
            sharding += f" into {prod(map(self.mesh.axis_size, winner.axes))}"
        return f"{sharding}: rule {_placed(winner)}"


@dataclass(frozen=True)
class RuleSet(RuleTable):
    """Mesh axes, and rules from logical names to them. A value; see `load_rules`.

    mode: "maxtext" is silent where MaxText is; "strict" refuses what silently changes the outcome: as the
    file is loaded, as a mesh is made, as a weight is resolved or laid out.
    """

    def file_findings(self) -> tuple[Finding, ...]:
        """Return all findings about the file itself, whatever the mesh sizes and tensors."""
        return check_file(self)

    def check(
        self,
        tensors: object = None,
        *,
        activations: object = None,
        mesh: DeviceMesh | None = None,
        devices: int | None = None,
        slices: int = 1,
        ici: Sizes | None = None,
        dcn: Sizes | None = None,
        dtype: object = "float32",
    ) -> CheckReport:
        """Return everything that is odd or wrong, in one report; touches no device and raises for no finding.

        Args:
            tensors: weights: LogicalTensors, or a mapping of name to `(names, shape)` or `(names, shape, dtype)`; None
                checks the file alone.
            activations: mapping of name to (logical names, shape), likewise.
            mesh: a mesh, or `devices`, `slices`, `ici` and `dcn` as of `mesh()`; neither: names only.
            devices: see mesh.
            slices: see mesh.
            ici: see mesh.
            dcn: see mesh.
            dtype: of tensors that do not say theirs.
        """
        if devices is None and (ici or dcn or slices != 1):
            raise RulesError("slices, ici and dcn say something about devices: give devices too")
        if mesh is not None:
            mesh = checked_mesh(mesh)
        request = None if devices is None else SizeRequest.of(devices, slices, ici, dcn)
        return check_rules(self, tensors, activations=activations, mesh=mesh, request=request, dtype=dtype)

    def explain(
        self,
        names: Sequence[str | None],
        shape: Sequence[int] | None = None,
        mesh: DeviceMesh | None = None,
        *,
        parameter: str | None = None,
    ) -> Explanation:
        """Return, for each dim, the rule that decided it, every rule tried before it, and what blocked those."""
        mesh = None if mesh is None else checked_mesh(mesh)
        extents = None if shape is None else checked_shape(shape, "" if parameter is None else parameter)
        return Explanation(parameter, extents, mesh, self.resolver(parameter).trace(names))


def _placed(rule: Rule) -> str:
    return f"{rule} ({rule.where})" if rule.where else str(rule)
