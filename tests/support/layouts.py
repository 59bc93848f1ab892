"""Hypothesis strategies of meshes and layouts."""

from __future__ import annotations

from hypothesis import strategies as st

from lowshard import DeviceMesh, Layout
from lowshard import dtypes as dt

AXES = ("dp", "tp", "pp")
OPS = ("sum", "avg", "min", "max", "prod")


@st.composite
def meshes(draw: st.DrawFn, max_size: int = 8) -> DeviceMesh:
    shape = draw(
        st.lists(st.integers(1, max_size), min_size=1, max_size=3).filter(
            lambda s: s[0] * (s[1:] or [1])[0] * (s[2:] or [1])[0] <= max_size
        )
    )
    return DeviceMesh(shape, AXES[: len(shape)])


shapes = st.lists(st.one_of(st.integers(0, 4), st.integers(5, 13)), max_size=3).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: DeviceMesh | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    partial: bool = True,
) -> Layout:
    """Any layout: nested axes in any order, both splits on one dim, partial axes of ops that commute."""
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes) if shape is None else shape
    names = [r.name for r in dt.all_dtypes()]
    dtype = draw(st.sampled_from(names)) if dtype is None else dtype
    kind = dt.get(dtype).kind
    ops = [o for o in OPS if not (kind == "bool" and o == "avg")]
    may_partial = partial and kind != "scale"
    family = draw(st.sampled_from([["sum", "avg"] if "avg" in ops else ["sum"], *[[o] for o in ops]]))
    placed: dict[str, object] = {}
    partials: dict[str, str] = {}
    for axis in mesh.axis_names:
        choices = ["R", *range(len(shape)), *(["P"] if may_partial else [])]
        choice = draw(st.sampled_from(choices))
        if choice == "P":
            partials[axis] = draw(st.sampled_from(family))
        elif choice != "R":
            placed[axis] = choice
    order = draw(st.permutations(list(placed)))
    spec = tuple(tuple(a for a in order if placed[a] == dim) for dim in range(len(shape)))
    made = Layout.from_spec(mesh, shape, dtype, spec, partial=partials)  # type: ignore[arg-type]
    splits = [
        draw(st.sampled_from(["balanced", "balanced", "ceil"])) if a in placed else "balanced"
        for a in mesh.axis_names
    ]
    data = made.to_json()
    data["splits"] = splits
    return Layout.from_json(data)
