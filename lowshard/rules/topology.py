"""Sizes of mesh axes over devices and slices, and the mesh they make.

Inside a slice the fast links (ICI) join the devices, between slices the slow ones (DCN). An axis has a
size on each; its size in the mesh is their product, with slices as the outer blocks. One size of each
kind may be -1: what is left over. Rules and defaults are MaxText's (commit e591f30: `fill_unspecified_
mesh_axes`, base.yml) and the device order that of JAX's `create_hybrid_device_mesh` on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from lowshard.argument import quoted, whole
from lowshard.document import Where
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.nearest import nearest
from lowshard.rules.axis_rule import MESH_AXES, rules_error
from lowshard.rules.finding import Finding, Mode, find

Sizes = Mapping[str, int]

ICI_DEFAULTS: Sizes = {"fsdp": -1}
DCN_DEFAULTS: Sizes = {"data": -1}
MAX_DEVICES = 1 << 24
_FIXED = ("attn_dp", "attn_dp_expert")  # MaxText gives them no setting
# What MaxText calls the setting of an axis, where that is not the axis' name.
_SETTINGS = {"stage": "pipeline", "model": "tensor"}


@dataclass(frozen=True)
class Topology:
    """Devices, slices and the size of each mesh axis within and across slices, filled."""

    axis_names: tuple[str, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis: within a slice times across slices."""
        return tuple(i * d for i, d in zip(self.ici, self.dcn, strict=True))

    def ranks(self) -> Sequence[int]:
        """Return the device at each row-major mesh position: slices are the outer blocks of every axis."""
        if prod(self.dcn) == 1:
            return range(prod(self.ici))
        inner = _strides(self.ici)
        outer = _strides(self.dcn)
        per_slice = prod(self.ici)
        # For each axis, what each of its coordinates adds to the device number.
        steps = [
            [c // i * outer[a] * per_slice + c % i * inner[a] for c in range(i * d)]
            for a, (i, d) in enumerate(zip(self.ici, self.dcn, strict=True))
        ]
        return [sum(parts) for parts in product(*steps)]

    def mesh(self, memory_budget_bytes_per_device: float | None = None) -> DeviceMesh:
        """Return the device mesh."""
        return DeviceMesh(self.shape, self.axis_names, memory_budget_bytes_per_device, ranks=self.ranks())


@dataclass(frozen=True)
class SizeRequest:
    """The requested devices (over all slices), slices, and sizes by axis."""

    devices: int
    slices: int = 1
    ici: tuple[tuple[str, int], ...] = ()
    dcn: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls, devices: int, slices: int = 1, ici: Sizes | None = None, dcn: Sizes | None = None
    ) -> SizeRequest:
        """Return the request, checked as far as it can be without a mesh."""
        devices = whole(devices, "devices is a whole number >= 1", RulesError, 1)
        slices = whole(slices, "slices is a whole number >= 1", RulesError, 1)
        if devices > MAX_DEVICES:
            raise rules_error(f"devices is at most {MAX_DEVICES}, got {quoted(devices)}")
        if devices % slices:
            raise rules_error(
                f"slices hold equally many devices: {devices} devices do not divide into {slices} slices; "
                "devices counts those of all slices"
            )
        return cls(devices, slices, _sizes("ici", ici), _sizes("dcn", dcn))

    @property
    def pipelined(self) -> bool:
        """True where a size above 1 is asked for `stage`; -1 does not count, filled or not (as MaxText)."""
        return any(dict(kind).get("stage", 1) > 1 for kind in (self.ici, self.dcn))


def check_sizes(
    axes: Sequence[str], request: SizeRequest, mode: Mode, where: Where | None = None
) -> tuple[Topology | None, list[Finding]]:
    """Return the topology that a request gives for these mesh axes (None if none fits) and findings."""
    findings: list[Finding] = []

    def add(code: str, text: str, axis: str | None = None) -> None:
        findings.append(find(code, mode, text, where, axis=axis))

    asked = {"ici": _for_axes(dict(request.ici), axes), "dcn": _for_axes(dict(request.dcn), axes)}
    for kind, sizes in asked.items():
        for axis, size in sizes.items():
            if axis in axes:
                if axis in _FIXED and size != 1:
                    add("mesh-size", f"the axis {axis!r} has no size setting in MaxText: it is 1", axis)
            elif axis in MESH_AXES:
                text = (
                    f"{kind} asks for {axis}={size}, but the mesh has no axis {axis!r} ({', '.join(axes)}); "
                    "MaxText ignores such a size without a word"
                )
                add("size-for-absent-axis", text, axis)
            else:
                hint = nearest(axis, (*axes, *MESH_AXES), 1)
                text = f"{kind} asks for {axis}={size}, but neither the mesh ({', '.join(axes)}) nor MaxText has it"
                add("mesh-size", text + hint, axis)
    for axis in axes:
        if axis not in MESH_AXES:
            if axis in asked["ici"] or axis in asked["dcn"]:
                add(
                    "mesh-axis-unknown", f"MaxText itself has no mesh axis {axis!r}: it would fail here", axis
                )
            else:
                text = (
                    f"the mesh axis {axis!r} is none of MaxText's ({', '.join(MESH_AXES)}) and has no size: to use "
                    f"an axis of your own, give its size: ici={{{axis!r}: 4}}{nearest(axis, MESH_AXES, 1)}"
                )
                add("mesh-size", text, axis)
    per_slice = request.devices // request.slices
    ici = _filled("ici", axes, asked["ici"], ICI_DEFAULTS, per_slice, "devices of a slice", add)
    dcn: tuple[int, ...] | None = (1,) * len(axes)
    across = {axis: size for axis, size in request.dcn if size > 1}
    if request.slices == 1 and across:
        listed = ", ".join(f"{axis}={size}" for axis, size in across.items())
        text = (
            f"dcn asks for {listed} across slices, and there is one slice, where MaxText ignores it without a word: "
            f"give the number of slices too (slices, --slices), such as {prod(across.values())}"
        )
        add("size-across-one-slice", text, next(iter(across)))
    if request.slices > 1:
        dcn = _filled("dcn", axes, asked["dcn"], DCN_DEFAULTS, request.slices, "slices", add)
    if ici is None or dcn is None or any(f.severity == "error" for f in findings):
        return None, findings
    return Topology(tuple(axes), ici, dcn), findings


def _filled(
    kind: str,
    axes: Sequence[str],
    asked: Sizes,
    defaults: Sizes,
    target: int,
    of: str,
    add: Callable[[str, str, str | None], None],
) -> tuple[int, ...] | None:
    """Return one size per axis with -1 filled, or None with the reason added."""
    sizes = [asked.get(axis, 1) for axis in axes]
    for axis, size in defaults.items():
        if axis not in axes or axis in asked:
            continue
        if -1 in sizes:
            fill = axes[sizes.index(-1)]
            text = (
                f"{kind} {fill}=-1 takes what is left and {axis} becomes 1; MaxText's own default is {axis}=-1 "
                f"too, and it refuses two: give it {kind}_{axis}_parallelism=1"
            )
            add("two-fill-defaults", text, fill)
        else:
            sizes[axes.index(axis)] = size
    fills = [axis for axis, size in zip(axes, sizes, strict=True) if size == -1]
    shown = " x ".join(f"{a}={s}" for a, s in zip(axes, sizes, strict=True) if s != 1) or "1"
    if len(fills) > 1:
        add("mesh-size", f"one {kind} size at most is -1 (what is left over), got {shown}", fills[1])
        return None
    rest = prod(s for s in sizes if s != -1)
    if fills:
        if target % rest or target < rest:
            text = (
                f"{kind} {shown} leaves {target}/{rest} for {fills[0]}, which is not a whole number >= 1: "
                f"the sizes must multiply to the {target} {of}"
            )
            add("mesh-size", text, fills[0])
            return None
        sizes[axes.index(fills[0])] = target // rest
    elif rest != target:
        largest = max(axes, key=lambda a: sizes[axes.index(a)]) if axes else None
        blamed = next((a for a in axes if a in asked), largest)
        text = f"the {kind} sizes multiply to {rest} ({shown}), but there are {target} {of}: none may be left idle"
        if kind == "dcn" and "data" not in axes and not asked:
            text += "; this mesh has no data axis to span the slices: give dcn a size, such as fsdp=-1"
        add("mesh-size", text, blamed)
        return None
    return tuple(sizes)


def _for_axes(asked: Sizes, axes: Sequence[str]) -> Sizes:
    """Return sizes by axis of the mesh, where MaxText has one setting under another name."""
    out = dict(asked)
    if "tensor" in out and "model" in axes and "model" not in out:
        out["model"] = out["tensor"]
        if "tensor" not in axes:
            del out["tensor"]
    return out


def _sizes(kind: str, sizes: Sizes | None) -> tuple[tuple[str, int], ...]:
    if sizes is None:
        return ()
    if not isinstance(sizes, Mapping):
        raise rules_error(
            f"{kind} is a mapping of mesh axis to size, such as {{'fsdp': -1}}, got {quoted(sizes)}"
        )
    out: dict[str, int] = {}
    for axis, size in sizes.items():
        rule = f"{kind} maps a mesh axis to a size >= 1, or -1 for what is left"
        if not isinstance(axis, str):
            raise rules_error(f"{rule}, got {quoted(axis)}: {quoted(size)}")
        try:
            size = whole(size, f"{rule}, got {quoted(axis)}: {quoted(size)}", RulesError, -1)
        except RulesError:
            size = 0
        if not size:
            raise rules_error(f"{rule}, got {quoted(axis)}: {quoted(sizes[axis])}", axis=axis)
        name = next((a for a, setting in _SETTINGS.items() if setting == axis and a == "stage"), axis)
        if name in out:
            raise rules_error(f"{kind} gives a size for {name!r} twice (as 'pipeline' too)", axis=name)
        out[name] = size
    return tuple(out.items())


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]
