"""Whatever outside data holds: a LowshardError or a right result, within 2 s and 256 MB. No reader is forgotten."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import mode, outside_data
from support.sources import tree_of

from lowshard import DeviceMesh, LowshardError
from lowshard.checkpoint import Catalog, read_header
from lowshard.checkpoint.delta_file import Delta, open_deltas
from lowshard.checkpoint.overview import look_at
from lowshard.cost import ClusterProfile
from lowshard.demo.source import user_checkpoint
from lowshard.errors import CheckpointError, LayoutError, MeshError
from lowshard.reading import READERS, read_text
from lowshard.reshard.rank_grid import Grid
from lowshard.rules.golden import read_dump
from lowshard.rules.loading import load_rules
from lowshard.solver.graph.graph_file import load_graph
from lowshard.weights.name_pattern import NamePatterns, Sizes

ROOT = Path(__file__).resolve().parents[2]
CASES = 2_000 if mode.full() else 120

# Who decodes JSON beside `reading`: what our own processes tell each other in this run, and formats with rules of
# their own, each fuzzed by its own test.
ELSEWHERE = {
    "lowshard/reading.py": "the reader",
    "lowshard/document.py": "the parser of YAML",
    "lowshard/checkpoint/header.py": "safetensors headers: tests/unit/test_checkpoint_header.py",
    "lowshard/rules/golden.py": "dumps, among the texts of outside_data",
    "lowshard/weights/reshard_command.py": "a report that our own rank wrote",
    "lowshard/weights/convert_plan.py": "settings for our own ranks",
    "lowshard/weights/save.py": "rows of our own ranks",
    "lowshard/comm/agreement.py": "between ranks",
    "lowshard/reshard/content_digest.py": "between ranks",
    "lowshard/fsdp/model_state.py": "between ranks",
    "lowshard/reshard/publisher.py": "between ranks",
    "lowshard/reshard/subscriber.py": "between ranks",
    "lowshard/comm/nccl.py": "between ranks",
    "lowshard/comm/failure.py": "records on connections that brought the token",
    "lowshard/comm/call_comparison.py": "between ranks",
    "lowshard/demo/demo_job.py": "settings for our own ranks",
    "lowshard/demo/source.py": "our own cache, which is made anew where it cannot be read",
    "lowshard/selftest/comparisons.py": "what our own ranks found",
    "lowshard/selftest/steps.py": "settings for our own ranks",
    "launch/doctor_finding.py": "output of our own children",
    "launch/job.py": "our own supervisors, which know the token",
    "bench/bench_publish.py": "what our own processes ask and answer",
    "bench/bench_world.py": "settings for our own ranks, and what they found",
    "bench/rival_jax.py": "settings for our own ranks",
    "bench/rival_torch.py": "settings for our own ranks",
}


ALL = [
    *(("reader", n) for n in sorted(outside_data.samples())),
    *(("text", n) for n in sorted(outside_data.texts())),
]


def test_every_reader_has_a_sample_here() -> None:
    assert outside_data.unknown_readers() == set()


def test_json_and_yaml_are_decoded_by_the_readers_alone() -> None:
    found = set()
    for folder in ("lowshard", "launch", "bench", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree_of(path)):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if name in ("json.loads", "json.load") or name.startswith("yaml."):
                    found.add(str(path.relative_to(ROOT)))
    assert found <= set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(outside_data.samples()))
def test_a_sample_is_read(name: str) -> None:
    outside_data.import_everything()
    outside_data.use(name, READERS[name](outside_data.samples()[name]))
    outside_data.use(name, READERS[name].text(json.dumps(outside_data.samples()[name])))


@pytest.mark.parametrize(("kind", "name"), mode.sample(ALL, 3, "readers"))
def test_damaged_data_is_refused_or_right(kind: str, name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "support.reader_cases", kind, name, str(CASES), str(mode.seed())],
        capture_output=True, text=True, timeout=3600, cwd=ROOT / "tests",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    print(name, ran.stdout.strip())


@pytest.mark.parametrize(
    ("name", "change", "kind", "text"),
    [
        ("mesh", {"shape": [2, True]}, MeshError, r"at \$\.shape\[1\]: .*int.*bool"),
        ("mesh", {"color": 1}, MeshError, "color.*the keys are shape, "),
        ("layout", {"mesh": {"shape": [2], "axis_names": ["a", "a"]}}, MeshError, r"at \$\.mesh: "),
        ("flat plan", {"shards": 0}, LayoutError, "shards >= 1"),
        ("index of a sharded checkpoint", {"files": []}, CheckpointError, "files"),
    ],
)  # fmt: skip
def test_an_error_says_place_what_was_expected_and_what_came(
    name: str, change: dict[str, Any], kind: type[LowshardError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        READERS[name]({**outside_data.samples()[name], **change})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"shape": [2], "shape": [2], "axis_names": ["a"]}', "twice"),
        ('{"shape": [NaN], "axis_names": ["a"]}', "finite"),
        ('{"shape": [%s], "axis_names": ["a"]}' % ("9" * 5000), "digits"),
        ("[" * 200_000, "nests too deep"),
        ("[" + "0," * 2_000_000 + "0]", "at most 2000000 values"),
    ],
)
def test_what_json_can_spell_and_a_value_cannot_be(text: str, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        READERS["mesh"].text(text)


OF_FILES: dict[str, Callable[[str], object]] = {
    "checkpoint": Catalog.open, "header": read_header, "overview": look_at, "graph": load_graph,
    "name patterns": NamePatterns.load, "model's config": Sizes.from_config, "profile": ClusterProfile.load,
    "rules": load_rules, "dump": read_dump, "demo's checkpoint": user_checkpoint,
    "delta": Delta.open, "deltas": lambda path: open_deltas([path]),
}  # fmt: skip


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("name", OF_FILES)
def test_a_path_that_the_system_refuses_or_that_leads_to_no_file_is_an_error(
    tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for somebody to write
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    for path in ("x" * 5000, tmp_path, tmp_path / "pipe" / "x", closed / "x"):
        with pytest.raises(LowshardError):
            OF_FILES[name](str(path))
    for empty in (tmp_path / "pipe", Path("/dev/null")):
        with nullcontext() if name == "rules" else pytest.raises(LowshardError):  # no rules are rules
            OF_FILES[name](str(empty))


def test_a_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(LayoutError, match=r"graph\.yaml:1: .* byte 0xe9"):
        load_graph(path)
    with pytest.raises(LayoutError, match="at most 4 bytes"):
        read_text(path, "graph file", LayoutError, 4)


def test_large_values_are_not_written_out() -> None:
    mesh = DeviceMesh.from_json({"shape": [50_000_000], "axis_names": ["x"]})
    assert isinstance(mesh.ranks, range)
    assert mesh.world_size == 50_000_000
    with pytest.raises(MeshError, match="at most 1048576 ranks"):
        Grid(((),), ((1_000_000_000, 1),))
    with pytest.raises(LayoutError, match="up to 20000 tensors"):
        load_graph(
            {"inputs": {"x": [4]}, "ops": [{"repeat": 10**9, "ops": [{"op": "relu", "in": "x", "out": "y"}]}]}
        )


def test_an_error_that_quotes_a_long_text_tells_its_ends() -> None:
    text = str(LayoutError("the name " + "[" * 50_000 + " is no name"))
    assert len(text) < 20_000
    assert (text[:10], text[-4:]) == ("the name [", "name")
