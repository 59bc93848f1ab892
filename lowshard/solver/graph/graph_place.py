"""Places: where a tensor of a graph shall lie on meshes that are not known yet. Text, axis by axis."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowshard.argument import brief, instance
from lowshard.errors import LayoutError, ShardingError
from lowshard.mesh import DeviceMesh
from lowshard.placement import Placement, Sharded, parse_placement

Place = str | Mapping[str, Placement] | None
"""\"R\" (replicated), text such as "dp=S0 tp=P", a mapping of mesh axis to placement, or None: the solver chooses."""

_RULE = "a place is 'R' or axis=placement pairs such as 'dp=S0 tp=R', as text or as a mapping, or None"
_CUT = re.compile(r"S(-?[0-9]{1,9})(?::(ceil|balanced))?", re.ASCII)


def written_place(place: object) -> str | None:
    """Return a place as text, axis=placement pairs in order; "R" stays."""
    if place is None:
        return None
    if isinstance(place, str):
        if place.strip() == "R":
            return "R"
        pairs = [(axis, text) for axis, _, text in (token.partition("=") for token in place.split())]
    else:
        given = instance(place, Mapping, _RULE, LayoutError)  # type: ignore[type-abstract]
        pairs = [(axis, str(p) if isinstance(p, Placement) else p) for axis, p in given.items()]
    is_said = bool(pairs) or not isinstance(place, str)
    if not is_said or not all(isinstance(part, str) and part for pair in pairs for part in pair):
        raise LayoutError(f"{_RULE}; got {brief(place)}")
    if len({axis for axis, _ in pairs}) < len(pairs):
        raise LayoutError(f"a place names each mesh axis once, got {brief(place)}")
    return " ".join(f"{axis}={_placement(text)}" for axis, text in pairs) or "R"


def settled_place(place: str | None, ndim: int, what: str) -> str | None:
    """Return a place with its dims counted from 0."""
    if place is None or place == "R":
        return place
    found = []
    for axis, _, text in (token.partition("=") for token in place.split()):
        placement = _placement(text)
        if isinstance(placement, Sharded):
            if not -ndim <= placement.dim < ndim:
                raise LayoutError(
                    f"{what} has {ndim} dims, and its place {place!r} cuts dim {placement.dim} over mesh axis {axis!r}"
                )
            placement = Sharded(placement.dim % ndim, placement.split)
        found.append(f"{axis}={placement}")
    return " ".join(found)


def place_on(place: Place, mesh: DeviceMesh) -> str:
    """Return the axis=placement pairs of a place that are about axes of a mesh: the others are passed over."""
    text = written_place(place)
    if text is None or text == "R":
        return ""
    return " ".join(token for token in text.split() if token.partition("=")[0] in mesh.axis_names)


def _placement(text: str) -> Placement:
    """Return the placement of a text; other than in layouts, a dim may be counted from the end."""
    cut = _CUT.fullmatch(text)
    if cut is not None:
        return Sharded(int(cut[1]), "ceil" if cut[2] == "ceil" else "balanced")
    try:
        return parse_placement(text)
    except ShardingError as error:
        raise LayoutError(f"{_RULE}; {error}") from None
