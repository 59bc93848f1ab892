"""Actions and candidates as text: what moves, what it is priced at, what else there was and why it was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowshard.placement import Placement
from lowshard.solver.action import HOW, Action, AxisAssignment
from lowshard.solver.transition import collective_of

if TYPE_CHECKING:
    from lowshard.solver.action_set import ActionSet

_SHOWN = 24


def explain(action: Action) -> str:
    """Return an action as text of several lines; the candidate table comes last."""
    unit = "bytes of whole tensors" if action.prices == "published" else "bytes a rank sends"
    lines = [f"{action.op}{_args(action)}: {action.cost_bytes:,.0f} bytes ({unit}) on mesh {action.mesh}"]
    for k, (source, needed) in enumerate(zip(action.sources, action.inputs, strict=True)):
        moves = action.reshards[k]
        lines.append(f"  operand {k}: {source}" + ("" if moves else ", as it comes"))
        lines.extend(f"    {move}" for move in moves)
        if moves:
            lines.append(f'    by hand: redistribute(local, src, Layout.parse(mesh, "{needed}"), comm)')
    lines.extend(f"  result {k}: {layout}" for k, layout in enumerate(action.outputs))
    for name, size, row in zip(action.mesh.axis_names, action.mesh.shape, action.rows, strict=True):
        if row.how != "local" and size > 1:
            inner = ", ".join(f"{c} over {over:,.0f} bytes" for c, over in row.inner)
            lines.append(f"  {name}: {HOW[row.how]}" + (f" ({inner})" if inner else ""))
    offered = candidates_of(action)
    if offered is not None:
        lines.append(table(offered, True, action.rows))
    return "\n".join(lines)


def candidates_of(action: Action) -> ActionSet | None:
    """Return the action set that an action came from, made anew where it is not at hand; None for rows of no rule."""
    if action.action_set is not None:
        return action.action_set
    from lowshard.solver.pick import action_set
    from lowshard.solver.table import RULES

    if action.op not in RULES:
        return None
    return action_set(
        action.op,
        action.sources,
        "documented" if action.prices == "published" else "extended",
        **dict(action.args),
    )


def table(
    action_set: ActionSet, allow_partial_to_sharded: bool, chosen: Sequence[AxisAssignment] | None = None
) -> str:
    """Return the candidate rows of each mesh axis as an aligned table, each with its price and its fate."""
    held = [layout.placements for layout in action_set.layouts]
    heads = ("axis", *(f"operand {k}" for k in range(len(held))), "result", "collectives", "bytes", "")
    body: list[tuple[str, ...]] = []
    for axis, name in enumerate(action_set.mesh.axis_names):
        for candidate in action_set.candidates(axis)[:_SHOWN]:
            row = candidate.row
            moves = [
                (placements[axis], need) for placements, need in zip(held, row.needed_inputs, strict=True)
            ]
            names = [collective_of(a, b, action_set.prices) for a, b in moves]
            names += [inner for inner, _ in row.inner]
            taken = chosen is not None and chosen[axis] == row
            barred = candidate.reduces_to_shards and not allow_partial_to_sharded
            fate = "chosen" if taken else "not allowed: P -> S" if barred else ""
            if not fate and candidate.reduces_to_shards:
                fate = "only with allow_partial_to_sharded"
            outputs = row.outputs(len(action_set.results))
            body.append(
                (
                    name,
                    *(_arrow(a, b) for a, b in moves),
                    ",".join(map(str, dict.fromkeys(outputs))),
                    " + ".join(n for n in names if n not in ("noop",)) or "-",
                    f"{candidate.cost_bytes:,.0f}",
                    fate,
                )
            )
        hidden = len(action_set.candidates(axis)) - _SHOWN
        if hidden > 0:
            body.append((name, f"... {hidden} more", *[""] * (len(heads) - 2)))
    widths = [max(len(line[i]) for line in (heads, *body)) for i in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *body)
    ]
    lines.extend(f"refused: {text}" for text in action_set.refused)
    return "\n".join(lines)


def _arrow(held: Placement, need: Placement) -> str:
    return str(held) if held == need else f"{held}->{need}"


def _args(action: Action) -> str:
    return "(" + ", ".join(f"{n}={v}" for n, v in action.args) + ")" if action.args else ""
