"""The rules of one configuration, without devices: the specs, meshes and layouts that they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from lowshard.argument import instance, quoted, truth, whole
from lowshard.box import Split
from lowshard.document import Where
from lowshard.errors import RulesError, ShardingError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.rules.axis_rule import Rule, as_rules, rules_error
from lowshard.rules.binding import check_bound, check_told, indivisible
from lowshard.rules.extension import Extension, matches
from lowshard.rules.finding import CheckReport, Finding, Mode, find
from lowshard.rules.logical_tensor import checked_mesh, checked_shape
from lowshard.rules.resolution import Resolution, Resolver, Spec, without_axes
from lowshard.rules.topology import SizeRequest, Sizes, Topology, check_sizes

BASE_CONTEXT = "context"
"""MaxText's `context_sharding` where no rule file says otherwise."""
CONTEXTS = ("context", "expert")
"""What MaxText takes for it."""
_RULES_KEY = "logical_axis_rules"
PIPELINE_BATCH = "activation_embed_and_logits_batch"
PIPELINE_BATCH_AXES = ("stage", "data", "fsdp", "fsdp_transpose", "expert")
"""What MaxText sets the first rule of that name to, for a pipeline."""


@dataclass(frozen=True)
class RuleTable:
    """Mesh axes, and rules from logical names to them. A value; `RuleSet` adds the reports about it.

    mode: "maxtext" is silent where MaxText is; "strict" refuses what silently changes the outcome: when the file is
    loaded, a mesh is made, or a weight is resolved or laid out.
    """

    source: str
    """The file it was read from, or what the caller called it."""
    mode: Mode
    mesh_axes: tuple[str, ...]
    data_sharding: tuple[tuple[str, ...], ...]
    """For each dim of the loaded batch the mesh axes that shard it."""
    logical_axis_rules: tuple[Rule, ...]
    extension: Extension = field(default_factory=Extension)
    places: tuple[tuple[str, Where], ...] = ()
    """The place of each key in the file."""
    context_written: str | None = None
    """`context_sharding` as the file has it, which MaxText ignores."""
    infers_context: bool = False
    """Whether context_sharding follows from the rules: of a rule file, yes; of base rules alone, no."""
    findings: tuple[Finding, ...] = field(default=(), compare=False, repr=False)
    """What was odd about the file."""
    _resolvers: dict[int, Resolver] = field(init=False, compare=False, repr=False, default_factory=dict)
    _layers: dict[str, int] = field(init=False, compare=False, repr=False, default_factory=dict)

    # ---- the file

    @property
    def context_sharding(self) -> str:
        """The mesh axis of context parallelism: the first axis of the first `activation_length` rule.

        Raises:
            RulesError: that axis is neither "context" nor "expert", which MaxText refuses.
        """
        rule = self.context_rule
        if rule is None:
            return BASE_CONTEXT
        if rule.axes[0] not in CONTEXTS:
            raise rules_error(
                f"context_sharding is the first axis of the first activation_length rule, and MaxText takes only "
                f"{' or '.join(CONTEXTS)}, not {rule.axes[0]!r}",
                rule=rule,
                axis=rule.axes[0],
            )
        return rule.axes[0]

    @property
    def context_rule(self) -> Rule | None:
        """The rule that context_sharding follows from, or None."""
        if not self.infers_context:
            return None
        rule = next((r for r in self.logical_axis_rules if r.name == "activation_length"), None)
        return rule if rule is not None and rule.axes else None

    def place(self, key: str) -> Where | None:
        """Return a key's place in the file, if it has one."""
        instance(key, str, "a key of a file is text", RulesError)
        return dict(self.places).get(key)

    def with_rules(self, rules: Iterable[tuple[str, object]], *, replace_all: bool = False) -> Self:
        """Return the rule set with rules laid over it as MaxText does for a model file or its command line.

        Every old rule whose name occurs among the new ones is dropped, and the new ones go to the
        END: an overridden name also loses its priority.

        Args:
            rules: (logical name, axis | axes | None) pairs, or Rule values.
            replace_all: as `override_logical_axis_rules`: only the new rules are left.
        """
        new = as_rules(rules)
        names = {r.name for r in new}
        is_all = truth(replace_all, "replace_all is True or False", RulesError)
        kept = () if is_all else tuple(r for r in self.logical_axis_rules if r.name not in names)
        return replace(self, logical_axis_rules=kept + new)

    def for_eval(self, other: RuleTable) -> Self:
        """Return the rules of evaluation: the other file's logical rules on this one's mesh.

        As `custom_mesh_and_rule_for_eval`; `check` names the axes this mesh then lacks.
        """
        instance(other, RuleTable, "for_eval takes a RuleSet", RulesError)
        places = {key: where for key, where in self.places if key != _RULES_KEY}
        where = other.place(_RULES_KEY)
        return replace(
            self, source=other.source, logical_axis_rules=other.logical_axis_rules, findings=other.findings,
            places=tuple((places if where is None else places | {_RULES_KEY: where}).items()),
        )  # fmt: skip

    # ---- names to specs

    def resolution(self, names: Sequence[str | None], *, parameter: str | None = None) -> Resolution:
        """Return the spec of a tensor's logical names and the rule behind each entry.

        parameter: its name, for rules that hold in some layers only.

        Raises:
            RulesError: a name on two dims, or a winning rule whose target no spec can hold.
        """
        return self.resolver(parameter).resolve(names)

    def resolve(self, names: Sequence[str | None], *, parameter: str | None = None) -> Spec:
        """Return the partition spec of a weight: per dim None, an axis, or axes (outer first).

        It knows no mesh: axes of size 1 stay, and axes the mesh lacks are not looked for.

        Raises:
            RulesError: as `resolution`; in strict mode also for a name that no rule is for, and for one
                whose rules are all blocked, both of which MaxText replicates without a word.
        """
        found = self.resolution(names, parameter=parameter)
        if self.mode == "strict":
            check_told(found, self.resolver(parameter), parameter)
        return found.spec

    def resolve_activation(
        self, names: Sequence[str | None], mesh: DeviceMesh, rank: int | None = None
    ) -> Spec:
        """Return the partition spec of an activation: without axes of size 1 or that the mesh lacks.

        Conflicts are judged before those axes go; both modes replicate names without a rule. rank: number of
        rank the spec is truncated to.
        """
        mesh = checked_mesh(mesh)
        if rank is not None:
            rank = whole(rank, "rank is the number of dims, 0 or more", RulesError, 0)
        real = (a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)
        spec = without_axes(self.resolution(names).spec, real)
        return spec if rank is None else spec[:rank]

    def resolver(self, parameter: str | None = None) -> Resolver:
        """Return the rules that hold for a parameter, ready to be asked."""
        layer = -1
        if parameter is not None:
            instance(parameter, str, "parameter is the name of a parameter, or None", RulesError)
        if parameter is not None and self.extension.layers:
            layer = self._layers.get(parameter, -2)
            if layer == -2:
                found = (i for i, e in enumerate(self.extension.layers) if matches(e.match, parameter))
                layer = self._layers[parameter] = next(found, -1)
        if layer not in self._resolvers:
            rules = self.logical_axis_rules
            if layer >= 0:
                entry = self.extension.layers[layer]
                names = {r.name for r in entry.rules}
                rest = () if entry.replace else tuple(r for r in rules if r.name not in names)
                rules = entry.rules + rest
            self._resolvers[layer] = Resolver(rules, self.place(_RULES_KEY))
        return self._resolvers[layer]

    # ---- meshes

    def bind(
        self, devices: int, ici: Sizes | None = None, slices: int = 1, dcn: Sizes | None = None
    ) -> tuple[Self, DeviceMesh]:
        """Return the mesh of these sizes and the rules as they hold there.

        The two belong together: a pipeline (stage > 1) changes the order of the mesh axes and one
        activation rule, as in MaxText. Arguments and errors as of `mesh`.
        """
        request = SizeRequest.of(devices, slices, ici, dcn)
        rules, edits = self.pipelined(request)
        topology, findings = rules.topology(request)
        CheckReport.of([*edits, *findings]).raise_first()
        assert topology is not None  # no error was found
        return rules, topology.mesh(self.extension.memory_budget_bytes_per_device)

    def mesh(
        self, devices: int, ici: Sizes | None = None, slices: int = 1, dcn: Sizes | None = None
    ) -> DeviceMesh:
        """Return the device mesh: sizes within a slice times sizes across slices.

        Args:
            devices: all of them, over all slices.
            ici: size by mesh axis within a slice; -1 once, for what is left. Others are 1, but fsdp
                takes what is left if no axis is -1.
            slices: equal groups of devices with fast links inside. They are the outer blocks of each axis.
            dcn: size by mesh axis across slices, likewise; data takes what is left.

        Raises:
            RulesError: two -1; sizes that do not multiply to the devices of a slice (the slices); an axis
                without a size that MaxText does not know; in strict mode a size for an absent axis or, in dcn,
                one where there is one slice.
        """
        return self.bind(devices, ici, slices, dcn)[1]

    def topology(self, request: SizeRequest) -> tuple[Topology | None, list[Finding]]:
        """Return the filled sizes of a request (None where nothing fits) and every finding about it."""
        return check_sizes(self.mesh_axes, request, self.mode, self.place("mesh_axes"))

    def pipelined(self, request: SizeRequest) -> tuple[Self, list[Finding]]:
        """Return the rules with MaxText's changes for a pipeline (stage > 1), and what was changed.

        `stage` and `data` change places where stage comes later; stage leads `data_sharding`; the first
        rule of `activation_embed_and_logits_batch` becomes stage, data, fsdp, fsdp_transpose, expert
        whatever the file says (MaxText at commit e591f30).
        """
        if not request.pipelined or "stage" not in self.mesh_axes:
            return self, []
        axes = list(self.mesh_axes)
        where = self.place("mesh_axes")
        if "data" not in axes:
            text = "a pipeline (stage > 1) needs the mesh axis 'data' beside 'stage'; mesh_axes lacks it"
            return self, [find("mesh-size", self.mode, text, where, axis="data")]
        changes = []
        stage, data = axes.index("stage"), axes.index("data")
        if stage > data:
            axes[stage], axes[data] = axes[data], axes[stage]
            changes.append(f"mesh_axes become {', '.join(axes)}")
        batch = tuple(
            tuple(sorted(dim, key=lambda axis: axis != "stage")) if place == 0 else dim
            for place, dim in enumerate(self.data_sharding)
        )
        if batch != self.data_sharding:
            changes.append("data_sharding starts with stage")
        changed = list(self.logical_axis_rules)
        first = next((i for i, r in enumerate(changed) if r.name == PIPELINE_BATCH), None)
        if first is not None and changed[first].axes != PIPELINE_BATCH_AXES:
            changed[first] = replace(changed[first], axes=PIPELINE_BATCH_AXES, fault="")
            changes.append(f"the rule of {PIPELINE_BATCH} becomes [{', '.join(PIPELINE_BATCH_AXES)}]")
        notes = [find("pipeline-edit", self.mode, f"for a pipeline {c}", where) for c in changes]
        made = replace(self, mesh_axes=tuple(axes), data_sharding=batch, logical_axis_rules=tuple(changed))
        return made, notes

    # ---- layouts

    def bound_spec(
        self,
        mesh: DeviceMesh,
        names: Sequence[str | None],
        shape: Sequence[int] | None = None,
        *,
        parameter: str | None = None,
        uneven: bool = False,
    ) -> Resolution:
        """Return the resolution of a weight, checked against the mesh and, where it is given, the shape.

        Raises:
            RulesError: what MaxText fails on for weights: a winning rule names an axis that the mesh
                lacks, or one axis twice; a dim that its axes do not divide (unless `uneven`); more names
                than dims; and as `resolution`.
        """
        mesh = checked_mesh(mesh)
        shape = None if shape is None else checked_shape(shape, "" if parameter is None else parameter)
        uneven = truth(uneven, "uneven is True or False", RulesError)
        found = self.resolution(names, parameter=parameter)
        if shape is not None and len(found.winners) > len(shape):
            raise rules_error(
                f"{_called(parameter, names)} has {len(shape)} dims, {list(shape)}, and {len(found.names)} logical "
                f"names, {list(found.names)}",
                rule=next((r for r in found.winners[len(shape) :] if r is not None), None),
            )
        for dim, rule in enumerate(found.winners):
            if rule is None or not rule.axes:
                continue
            check_bound(rule, mesh, parameter)
            if shape is not None and not uneven and shape[dim] % mesh.axis_size(rule.axes):
                raise indivisible(rule, mesh, shape[dim], f"dim {dim} of {_called(parameter, names)}")
        return found

    def layout(
        self,
        mesh: DeviceMesh,
        names: Sequence[str | None],
        shape: Sequence[int],
        dtype: object = "float32",
        *,
        parameter: str | None = None,
        activation: bool = False,
        uneven: bool = False,
        split: Split = "balanced",
    ) -> Layout:
        """Return where each element of a tensor lives; axes on one dim nest in the order of the rule.

        Args:
            mesh: the device mesh.
            names: a logical name or None for each dim; dims beyond the names stay whole.
            shape: global shape.
            dtype: any name of the dtype table.
            parameter: its name, for rules that hold in some layers only.
            activation: drop axes the mesh lacks, truncate the names to the rank, allow uneven dims.
            uneven: allow dims that the axes do not divide, which MaxText refuses for weights.
            split: how an uneven dim is split.

        Raises:
            RulesError: as `bound_spec`, and in strict mode as `resolve`.
        """
        mesh, extents = checked_mesh(mesh), checked_shape(shape, "" if parameter is None else parameter)
        if truth(activation, "activation is True or False", RulesError):
            spec = self.resolve_activation(names, mesh, len(extents))
            return Layout.from_spec(mesh, extents, dtype, spec, split)
        uneven = truth(uneven, "uneven is True or False", RulesError)
        found = self.bound_spec(mesh, names, extents, parameter=parameter, uneven=uneven)
        if self.mode == "strict":
            check_told(found, self.resolver(parameter), parameter)
        return Layout.from_spec(mesh, extents, dtype, found.spec, split)

    def data_layout(self, mesh: DeviceMesh, shape: Sequence[int], dtype: object = "int32") -> Layout:
        """Return where a loaded batch lives: `data_sharding`, truncated to the rank.

        Raises:
            RulesError: data_sharding names an axis the mesh lacks, or one axis twice.
        """
        mesh, extents = checked_mesh(mesh), checked_shape(shape, "of a batch")
        try:
            return Layout.from_spec(mesh, extents, dtype, self.data_sharding[: len(extents)])
        except ShardingError as error:
            axes = [a for dim in self.data_sharding for a in dim]
            odd = next((a for i, a in enumerate(axes) if a not in mesh.axis_names or a in axes[:i]), None)
            raise rules_error(f"data_sharding: {error}", self.place("data_sharding"), axis=odd) from error


def _called(parameter: str | None, names: Sequence[str | None]) -> str:
    return f"tensor {parameter!r}" if parameter else f"a tensor of {quoted(list(names))}"
