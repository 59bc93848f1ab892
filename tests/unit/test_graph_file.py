"""Graph files and `lowshard solve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowshard import DeviceMesh
from lowshard.cli import main
from lowshard.errors import LayoutError, MeshError, SolverError
from lowshard.solver import GraphSolver
from lowshard.solver.graph.graph_file import examples, load_graph
from lowshard.solver.solve_command import parse_bytes, parse_mesh

MLP = """
name: small
sizes: {tokens: 8}
inputs: {x: {shape: [tokens, 16], place: R}}
weights: {up: [16, 32], down: [32, 16]}
ops:
  - {op: matmul, in: [x, up], out: h}
  - {op: gelu, in: h, out: a}
  - {op: matmul, in: [a, down], out: y}
outputs: {y: R}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text(MLP)
    return path


@pytest.mark.parametrize("name", examples())
def test_an_example_binds(name: str) -> None:
    graph, sizes = load_graph(name)
    bound = graph.bind(sizes)
    assert len(bound.outputs) == 1


def test_a_block_is_repeated_and_carries() -> None:
    ops = [{"op": "matmul", "in": ["x", "w"], "out": "y"}, {"op": "add", "in": ["x", "y"], "out": "z"}]
    block = {"repeat": 3, "carry": {"x": "z"}, "weights": {"w": [8, 8]}, "ops": ops}
    end = {"op": "relu", "in": "x", "out": "end"}
    graph, _ = load_graph({"inputs": {"x": [8, 8]}, "ops": [block, end], "outputs": ["end"]})
    bound = graph.bind()
    names = [i.name for i in bound.tensors]
    reads = [[names[t] for t in n.operands] for n in bound.nodes]
    assert reads == [
        ["x", "layer0.w"], ["x", "layer0.y"],
        ["layer0.z", "layer1.w"], ["layer0.z", "layer1.y"],
        ["layer1.z", "layer2.w"], ["layer1.z", "layer2.y"],
        ["layer2.z"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ops": [{"op": "matmul", "in": ["x", "nowhere"], "out": "h"}]}, "no tensor 'nowhere'"),
        ({"ops": [{"op": "mixup", "in": ["x"], "out": "h"}]}, "no rule for op 'mixup'"),
        ({"ops": [{"op": "relu", "in": "x", "out": "x"}]}, "has a tensor 'x' already"),
        ({"layers": 3}, "layers.*the keys are ops, name"),
        ({"inputs": {"x": "8 by 8"}}, "inputs.x: .*'8 by 8'"),
        ({"inputs": {"x": {"shape": [8, 8], "place": "tp"}}}, "a place is 'R' or axis=placement"),
        ({"ops": [{"repeat": 0, "ops": [{}]}]}, "N >= 1"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(change: dict[str, object], text: str) -> None:
    data = {"inputs": {"x": [8, 8]}, "ops": [{"op": "relu", "in": "x", "out": "y"}], **change}
    with pytest.raises(LayoutError, match=text):
        load_graph(data)


def test_text_of_the_command_line() -> None:
    assert parse_mesh("dp=2,tp=4") == DeviceMesh((2, 4), ("dp", "tp"))
    assert parse_bytes("40GB") == 40e9
    assert parse_bytes("1.5 MiB") == 1.5 * 2**20
    assert parse_bytes("1e9") == 1e9
    for wrong in ("dp2", "dp=", "=4"):
        with pytest.raises(MeshError, match="AXIS=N"):
            parse_mesh(wrong)
    with pytest.raises(SolverError, match="40GB"):
        parse_bytes("much")


def test_a_table_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", str(file), "--mesh", "tp=2", "--run"]) == 0
    shown = capsys.readouterr().out
    assert "small on tp=2" in shown
    assert "ran graph on 2 ranks" in shown


def test_sizes_are_of_symbols_that_occur(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(MLP.replace("tokens: 8", "tokens: 8, tokns: 4"))
    with pytest.raises(LayoutError, match=r"symbols .* \(tokens\), got 'tokns'; did you mean tokens\?"):
        load_graph(path)
    graph, sizes = load_graph({"inputs": {"x": [4, "n"]}, "sizes": {"n": 2, "m": 8},
                               "ops": [{"op": "reshape", "in": "x", "out": "y", "shape": ["m"]}]})  # fmt: skip
    assert graph.bind(sizes).shapes[-1] == (8,)


def test_json_for_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", str(file), "--mesh", "tp=2", "--size", "tokens=6", "--json", "--run"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"graph", "greedy", "largest_error"}
    assert data["graph"]["price"] <= data["greedy"]["price"]
    assert max(data["largest_error"].values()) < 1e-4
    graph, sizes = load_graph(file)
    plan = GraphSolver().solve(graph, DeviceMesh((2,), ("tp",)), {**sizes, "tokens": 6})
    assert data["graph"] == json.loads(json.dumps(plan.to_json()))
    assert {"price", "bound", "gap", "method", "layouts"} <= set(data["graph"])


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (["--budget", "10"], 1, "smallest budget that would do is"),
        (["--size", "rows=3"], 2, "--size is NAME=N"),
        (["--budget", "much"], 2, "a budget is a number of bytes"),
        (["--budget", "0"], 2, "budget_bytes is a number of bytes above 0"),
        (["--flops", "0"], 2, "flops_per_s is a number of at least 1"),
        (["--node-size", "0"], 2, "node_size is a number of ranks"),
    ],
)
def test_exit_codes(
    file: Path, more: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", str(file), "--mesh", "tp=2", *more]) == code
    assert text in capsys.readouterr().err


def test_without_scipy_the_command_walks_op_by_op_and_names_the_extra() -> None:
    code = """
import sys
sys.modules["scipy"] = None
from lowshard.cli import main
assert main(["solve", "mlp", "--mesh", "tp=4"]) == 0
sys.exit(main(["solve", "mlp", "--mesh", "tp=4", "--budget", "20MB"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "op by op, for want of SciPy: pip install 'lowshard[solve]'" in ran.stdout, ran.stderr
    assert ran.returncode == 2
    assert "lowshard[solve]" in ran.stderr
