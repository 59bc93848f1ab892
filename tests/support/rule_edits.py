"""Near misses of the resolution of logical names, each as an edit of the library's source."""

from __future__ import annotations

from types import ModuleType

from lowshard.rules import golden, resolution, rule_table

Edit = tuple[ModuleType, str, str]

_WON = "            holders.update(dict.fromkeys(rule.axes, (dim, rule)))\n"
_LATE = "            if winners[dim] is not None:\n"
_CLASH = "            if not holders.keys().isdisjoint(rule.axes):\n"
_LESS = (
    "            rule = Rule(rule.name, tuple(a for a in rule.axes if a not in holders))\n"
    "            if False:\n"
)
_PLACE = "            places.setdefault(rule.name, []).append(place)\n"
_ORDER = "sorted(chain.from_iterable(self._places.get(name, ()) for name in dims))"
_DIM = "            dim = dims[rule.name]\n"
_ANY_DIM = (
    "            dim = dims.get(rule.name, -1)\n"
    "            if dim < 0:\n"
    f"    {_WON}"
    "                continue\n"
)
_ENTRIES = "tuple(None if winner is None else winner.entry for winner in winners)"
_SORTED = "tuple(None if w is None else Rule('', tuple(sorted(w.axes))).entry for w in winners)"
_NAMES = "tuple(n if w is None else w.entry for n, w in zip(names, winners))"
_TWICE = "if len(dims) + names.count(None) != len(names):"
_REAL = "        real = (a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)\n"
_FLOWING = "spec = without_axes(self.resolution(names).spec, real)"
_FIRST = (
    "kept = set(real); spec = Resolver(tuple(Rule(r.name, tuple(a for a in r.axes if a in kept)) "
    "for r in self.logical_axis_rules)).resolve(names).spec"
)
_NAMED = "[list(e) if isinstance(e, tuple) else e for e in spec]"
_SMALL = (
    "[list(e) if isinstance(e, tuple) else e "
    "for e in without_axes(spec, (a for a in mesh.axis_names if mesh.axis_size(a) > 1))]"
)
_BOUND = "            check_bound(rule, mesh, parameter)\n"
_DIVIDED = "shape[dim] % mesh.axis_size(rule.axes):"
_RANK = "if shape is not None and len(found.winners) > len(shape):"

EDITS: dict[str, list[Edit]] = {
    "dims in order, not rules": [(resolution, _ORDER, _ORDER.replace("sorted(", "list("))],
    "rules from the last to the first": [(resolution, f"in {_ORDER}", f"in {_ORDER}[::-1]")],
    "only the axis in conflict is dropped": [(resolution, _CLASH, _LESS)],
    "only a conflict of the first axis counts": [
        (resolution, _CLASH, _CLASH.replace("rule.axes", "rule.axes[:1]"))
    ],
    "a blocked rule holds its axes": [(resolution, _CLASH, f"{_CLASH}    {_WON}")],
    "a rule that comes too late holds its axes": [(resolution, _LATE, f"{_LATE}    {_WON}")],
    "the last rule of a name wins": [(resolution, _PLACE, "            places[rule.name] = [place]\n")],
    "only the first rule of a name counts": [
        (resolution, _PLACE, "            places.setdefault(rule.name, [place])\n")
    ],
    "an empty target is not final": [
        (resolution, _LATE, _LATE.replace("is not None", "is not None and winners[dim].axes"))
    ],
    "an empty target is skipped": [(resolution, _LATE, _LATE.replace(":", " or not rule.axes:"))],
    "rules of absent names hold axes": [
        (resolution, _ORDER, "range(len(self.rules))"),
        (resolution, _DIM, _ANY_DIM),
    ],
    "no conflicts at all": [(resolution, _CLASH, "            if False:\n")],
    "a target is sorted": [(resolution, _ENTRIES, _SORTED)],
    "a name without a rule is its own axis": [(resolution, _ENTRIES, _NAMES)],
    "a name on two dims is let through": [(resolution, _TWICE, "if False:")],
    "axes go from an activation before conflicts are judged": [(rule_table, _FLOWING, _FIRST)],
    "axes of size 1 stay in activations": [(rule_table, _REAL, _REAL.replace("n > 1", "n > 0"))],
    "an activation is not cut to its rank": [(rule_table, "spec if rank is None else spec[:rank]", "spec")],
    "axes of size 1 go from named files": [(golden, _NAMED, _SMALL)],
    "an axis the mesh lacks is dropped from a weight": [(rule_table, _BOUND, "            continue\n")],
    "dims need not be divided": [(rule_table, _DIVIDED, "False:")],
    "a dim need only be larger than its shards": [
        (rule_table, _DIVIDED, "shape[dim] < mesh.axis_size(rule.axes):")
    ],
    "an empty dim is refused": [
        (rule_table, _DIVIDED, "(shape[dim] % mesh.axis_size(rule.axes) or not shape[dim]):")
    ],
    "names beyond the rank are cut for weights": [
        (rule_table, _RANK, "if False:"),
        (
            rule_table,
            "for dim, rule in enumerate(found.winners):",
            "for dim, rule in enumerate(found.winners[: len(shape)]):",
        ),
    ],
}
