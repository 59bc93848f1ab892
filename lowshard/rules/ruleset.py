"""RuleSet: the rules of one configuration, with the reports about it: check, explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.rules.explanation import Explanation, explain_names
from lowshard.rules.file_check import check_file
from lowshard.rules.finding import CheckReport, Finding
from lowshard.rules.logical_tensor import checked_mesh
from lowshard.rules.rule_table import RuleTable
from lowshard.rules.rules_check import check_rules
from lowshard.rules.topology import SizeRequest, Sizes


@dataclass(frozen=True)
class RuleSet(RuleTable):
    """Mesh axes, and rules from logical names to them. A value; see `load_rules`.

    mode: "maxtext" is silent where MaxText is; "strict" refuses what silently changes the outcome: as the
    file is loaded, as a mesh is made, as a weight is resolved or laid out.
    """

    def file_findings(self) -> tuple[Finding, ...]:
        """Return everything that is odd about the file itself, whatever the mesh sizes and tensors."""
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
        """Return, for each dim, the rule that won, every rule tried before it, and what blocked those."""
        return explain_names(self, names, shape, mesh, parameter)
