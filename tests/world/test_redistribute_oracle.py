"""Two-axis transitions whose blocks were worked out elsewhere, among them those that published systems get wrong."""

from __future__ import annotations

import numpy as np
import pytest
from support import mode
from support.recorded import oracle

from lowshard import DeviceMesh, Layout, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.cost import ClusterProfile
from lowshard.placement import parse_placement


@pytest.mark.parametrize("cost", [None, ClusterProfile.default()], ids=["by bytes", "by seconds"])
def test_every_device_ends_with_exactly_the_listed_block(cost: ClusterProfile | None) -> None:
    for grid in oracle("redistribute")["meshes"]:
        mesh = DeviceMesh(grid["mesh_shape"], ("a", "b"))
        shape = tuple(grid["tensor_shape"])
        value = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        blocks = {tuple(row["placements"]): row["devices"] for row in grid["destination_blocks"]}
        wrong_elsewhere = grid["pairs_misordered_upstream"]
        name = f"oracle {grid['mesh_shape']} {shape}"
        pairs = wrong_elsewhere + mode.sample(grid["pairs_ok_upstream_order"], 15, name)

        def run(comm: lc.Communicator) -> int:
            for before, after in pairs:  # noqa: B023  run before the next grid
                src = Layout(mesh, shape, "float64", [parse_placement(p) for p in before])  # noqa: B023
                dst = src.with_placements([parse_placement(p) for p in after])
                terms = [n for n, p in zip(mesh.shape, before, strict=True) if p == "P"]  # noqa: B023
                part = value[tuple(slice(*span) for span in src.box(comm.rank))]  # noqa: B023
                local = np.ascontiguousarray(part / np.prod(terms)) if terms else np.ascontiguousarray(part)
                got = execute(plan_redistribute(src, dst, cost), local, comm)
                want = next(d for d in blocks[tuple(after)]  # noqa: B023
                            if tuple(d["coord"]) == mesh.coord(comm.rank))  # noqa: B023  # fmt: skip
                block = value[tuple(slice(*span) for span in want["slice"])]  # noqa: B023
                np.testing.assert_allclose(got, block, rtol=1e-12, err_msg=f"{before} -> {after}")
            return len(pairs)  # noqa: B023

        assert set(lc.run_loopback(mesh.size, run)) == {len(pairs)}
