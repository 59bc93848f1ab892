"""Random NamedShardings on 8 host devices against `devices_indices_map`: started by test_named_shardings.py.

usage: run_named_shardings.py COUNT SEED, with XLA_FLAGS=--xla_force_host_platform_device_count=8
"""

from __future__ import annotations

import re
import sys
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, ShardingError
from lowshard.errors import LowshardError
from lowshard.interop import jax as lj

NAMES = ("x", "y", "z")
GRIDS = [
    (8,), (4,), (3,), (1,), (2, 4), (4, 2), (3, 2), (1, 8), (2, 2), (2, 2, 2), (2, 1, 3), (1, 1, 7), (2, 3, 1),
]  # fmt: skip
DEVICES = jax.devices()


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def held(sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Return JAX's own map of devices to slices; a device's term of a sum covers what the rest of the spec gives it."""
    return NamedSharding(sharding.mesh, P(*sharding.spec.partitions)).devices_indices_map(shape)


def random_mesh(rng: np.random.Generator) -> Mesh:
    sizes = GRIDS[rng.integers(len(GRIDS))]
    order = rng.permutation(8) if rng.random() < 0.5 else np.arange(8)
    chosen = np.array([DEVICES[i] for i in order[: prod(sizes)]]).reshape(sizes)
    types = (AxisType.Explicit if rng.random() < 0.3 else AxisType.Auto,) * len(sizes)
    return Mesh(chosen, NAMES[: len(sizes)], axis_types=types)


def random_spec(rng: np.random.Generator, mesh: Mesh, ndim: int) -> tuple[Any, frozenset[str]]:
    names = list(rng.permutation(mesh.axis_names))
    cut = [name for name in names if rng.random() < 0.8]
    per_dim: list[list[str]] = [[] for _ in range(ndim)]
    for name in cut if ndim else []:
        per_dim[rng.integers(ndim)].append(str(name))
    entries: list[Any] = []
    for axes in per_dim:
        one = len(axes) == 1 and rng.random() < 0.5
        entries.append(axes[0] if one else tuple(axes) or (None if rng.random() < 0.9 else ()))
    while entries and not entries[-1] and rng.random() < 0.5:
        entries.pop()  # trailing dims may be left out
    if entries and mesh.axis_types[0] == AxisType.Auto and rng.random() < 0.02:
        entries[0] = P.UNCONSTRAINED
    free = [str(n) for n in names if n not in cut] if mesh.axis_types[0] == AxisType.Explicit else []
    unreduced = frozenset(n for n in free if rng.random() < 0.5)
    return P(*entries, unreduced=unreduced), unreduced


def check_refusal(text: str, given: NamedSharding, shape: tuple[int, ...]) -> None:
    """Check that JAX refuses it too, or leaves it to the compiler."""
    if "UNCONSTRAINED" in text:
        assert P.UNCONSTRAINED in given.spec.partitions, given
        return
    assert re.search(r"JAX shards only evenly: dim \d of \d+ elements", text), text
    with pytest.raises(ValueError, match="should evenly divide"):
        held(given, shape)


def random_shardings(count: int, rng: np.random.Generator) -> None:
    kept = refused = 0
    for _ in range(count):
        mesh = random_mesh(rng)
        shape = tuple(int(n) for n in rng.integers(0, 6, rng.integers(0, 4)))
        if rng.random() < 0.8:
            shape = tuple(n * mesh.size for n in shape)
        spec, unreduced = random_spec(rng, mesh, len(shape))
        given = NamedSharding(mesh, spec)
        case = f"{given} {shape}"
        try:
            layout = lj.layout(given, shape, jnp.bfloat16)
        except ShardingError as error:
            refused += 1
            check_refusal(str(error), given, shape)
            continue
        kept += 1
        assert layout.dtype == "bfloat16"
        for device, index in held(given, shape).items():
            assert layout.box(device.id) == box_of(index, shape), f"{case} {device}"
        assert {a for a, op in zip(layout.mesh.axis_names, layout.partials, strict=True) if op} == unreduced
        back = lj.sharding(layout, mesh)
        assert back.is_equivalent_to(given, len(shape)), case
        assert all((a or None) == b for a, b in zip(spec.partitions, back.spec.partitions, strict=False)), (
            case
        )
        assert back.spec.unreduced == unreduced
        assert lj.layout(back, shape, "bf16") == layout
        assert lj.spec(layout) == back.spec
        assert (
            lj.layout(spec, shape, "bf16", mesh=mesh)
            == lj.layout(spec, shape, "bf16", mesh=layout.mesh)
            == layout
        )
    assert kept > count // 2, kept
    assert refused > count // 50, refused


def random_layouts(count: int, rng: np.random.Generator) -> None:
    kept = 0
    for _ in range(count):
        mesh = random_mesh(rng)
        shape = tuple(int(n) for n in rng.integers(0, 30, rng.integers(1, 4)))
        ours = DeviceMesh(mesh.devices.shape, mesh.axis_names, ranks=[d.id for d in mesh.devices.flat])
        placed = [
            (Replicated(), Sharded(int(rng.integers(len(shape))), str(rng.choice(["ceil", "balanced"]))))[  # type: ignore[arg-type]
                int(rng.random() < 0.7)
            ]
            for _ in mesh.axis_names
        ]
        if rng.random() < 0.1:
            placed[0] = Partial(str(rng.choice(["sum", "max"])))  # type: ignore[arg-type]
        layout = Layout(ours, shape, "float32", placed)
        try:
            made = lj.sharding(layout, mesh)
        except ShardingError as error:
            text = str(error)
            assert "cuts only evenly" in text or "max" in text or "Explicit" in text, text
            continue
        kept += 1
        for device, index in held(made, shape).items():
            assert layout.box(device.id) == box_of(index, shape), f"{layout} {device}"
        again = lj.layout(made, shape, "float32")
        assert again.spec == layout.spec
        assert again.partials == layout.partials
    assert kept > count // 10, kept


def true_arrays() -> None:
    mesh = Mesh(np.array(DEVICES).reshape(2, 4), ("x", "y"))
    whole = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    for spec in (P(("y", "x")), P(("x", "y"), None), P("y", "x"), P(None, "y"), P()):
        array = jax.device_put(whole, NamedSharding(mesh, spec))
        layout = lj.layout(array.sharding, array.shape, array.dtype)
        for shard in array.addressable_shards:
            box = layout.box(shard.device.id)
            np.testing.assert_array_equal(np.asarray(shard.data), whole[tuple(slice(*i) for i in box)])
        parts = [
            jax.device_put(whole[tuple(slice(*i) for i in layout.box(d.id))], d) for d in mesh.devices.flat
        ]
        again = jax.make_array_from_single_device_arrays(whole.shape, lj.sharding(layout, mesh), parts)
        np.testing.assert_array_equal(np.asarray(again), whole)


def refused() -> None:
    mesh = Mesh(np.array(DEVICES).reshape(2, 4), ("x", "y"))
    ours = DeviceMesh((2, 4), ("x", "y"))
    rows = Layout(ours, (8, 8), "float32", (Sharded(0), Replicated()))
    explicit = Mesh(mesh.devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    cases: list[tuple[Any, str]] = [
        (lambda: lj.layout(SingleDeviceSharding(DEVICES[0]), (8,), "f32"), r"\(x, NamedSharding"),
        (
            lambda: lj.layout(jax.device_put(np.ones(8), NamedSharding(mesh, P("x"))), (8,), "f32"),
            r"Pass x\.sharding",
        ),
        (lambda: lj.layout(P("x"), (8,), "f32"), "a mesh is JAX's Mesh"),
        (lambda: lj.layout(NamedSharding(mesh, P("x")), (8,), "f32", mesh=mesh), "has a mesh"),
        (lambda: lj.layout(NamedSharding(mesh, P("x")), (9, 2), "f32"), r"dim 0 of 9 .* x=2 .* Pad it to 10"),
        (lambda: lj.layout(NamedSharding(mesh, P(None, "x")), (8,), "f32"), "one entry a dim"),
        (lambda: lj.layout(NamedSharding(explicit, P(reduced={"x"})), (8,), "f32"), "reduced over x"),
        (lambda: lj.layout(NamedSharding(mesh, P(P.UNCONSTRAINED)), (8,), "f32"), "compiler chooses"),
        (lambda: lj.sharding("S0", mesh), "takes a Layout"),  # type: ignore[arg-type]
        (lambda: lj.sharding(rows, ours), "JAX's Mesh"),
        (lambda: lj.sharding(rows, Mesh(mesh.devices.reshape(4, 2), ("x", "y"))), "same names"),
        (lambda: lj.sharding(rows, Mesh(mesh.devices[::-1], ("x", "y"))), "same names"),
        (lambda: lj.sharding(rows.with_shape((9, 8)), mesh), "only evenly"),
        (lambda: lj.sharding(rows.with_placements((Partial("max"), Replicated())), mesh), "x=max"),
        (lambda: lj.sharding(rows.with_placements((Partial("sum"), Replicated())), mesh), "axis_types="),
    ]
    for call, text in cases:
        with pytest.raises(LowshardError, match=text):
            call()
    abstract = AbstractMesh((2, 4), ("x", "y"))
    assert lj.sharding(rows, abstract).spec == P("x", None)
    assert lj.layout(lj.sharding(rows, abstract), (8, 8), "f32") == rows
    assert lj.sharding(rows, mesh, memory_kind="pinned_host").memory_kind == "pinned_host"


if __name__ == "__main__":
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    assert len(DEVICES) == 8, DEVICES
    random_shardings(count, np.random.default_rng([seed, 1]))
    random_layouts(count, np.random.default_rng([seed, 2]))
    true_arrays()
    refused()
    print(f"{count} NamedShardings and {count} layouts agree")
