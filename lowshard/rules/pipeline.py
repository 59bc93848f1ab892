"""What MaxText changes about a configuration once a pipeline is asked for (commit e591f30)."""

from __future__ import annotations

from dataclasses import replace

from lowshard.rules.finding import Finding, find
from lowshard.rules.ruleset import RuleSet
from lowshard.rules.topology import SizeRequest

BATCH = "activation_embed_and_logits_batch"
BATCH_AXES = ("stage", "data", "fsdp", "fsdp_transpose", "expert")


def pipelined(rules: RuleSet, request: SizeRequest) -> tuple[RuleSet, list[Finding]]:
    """Return the rules with MaxText's changes for a pipeline (stage > 1), and what was changed.

    `stage` and `data` change places where stage comes later; stage leads `data_sharding`; the first
    rule of `activation_embed_and_logits_batch` becomes stage, data, fsdp, fsdp_transpose, expert
    whatever the file says.
    """
    if not request.pipelined or "stage" not in rules.mesh_axes:
        return rules, []
    axes = list(rules.mesh_axes)
    where = rules.place("mesh_axes")
    if "data" not in axes:
        text = "a pipeline (stage > 1) needs the mesh axis 'data' beside 'stage'; mesh_axes lacks it"
        return rules, [find("mesh-size", rules.mode, text, where, axis="data")]
    changes = []
    stage, data = axes.index("stage"), axes.index("data")
    if stage > data:
        axes[stage], axes[data] = axes[data], axes[stage]
        changes.append(f"mesh_axes become {', '.join(axes)}")
    batch = tuple(
        tuple(sorted(dim, key=lambda axis: axis != "stage")) if place == 0 else dim
        for place, dim in enumerate(rules.data_sharding)
    )
    if batch != rules.data_sharding:
        changes.append("data_sharding starts with stage")
    changed = list(rules.logical_axis_rules)
    first = next((i for i, r in enumerate(changed) if r.name == BATCH), None)
    if first is not None and changed[first].axes != BATCH_AXES:
        changed[first] = replace(changed[first], axes=BATCH_AXES, fault="")
        changes.append(f"the rule of {BATCH} becomes [{', '.join(BATCH_AXES)}]")
    notes = [find("pipeline-edit", rules.mode, f"for a pipeline {c}", where) for c in changes]
    made = replace(rules, mesh_axes=tuple(axes), data_sharding=batch, logical_axis_rules=tuple(changed))
    return made, notes
