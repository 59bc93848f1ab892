"""One sound example for each reader of outside data, and what reads it: the registry's other half."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save, save_file
from support.checkpoints import save_over
from support.recorded import DATA

import lowshard
from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, plan_redistribute
from lowshard.checkpoint import Catalog
from lowshard.checkpoint.checkpoint_index import HF_INDEX, INDEX_NAME, Index, IndexedFile, IndexedTensor, Part
from lowshard.checkpoint.checkpoint_index import _digest as index_digest
from lowshard.checkpoint.overview import look_at, verified
from lowshard.comm import run_loopback
from lowshard.cost import ClusterProfile
from lowshard.demo.source import SYNTHETIC_CONFIG, user_checkpoint
from lowshard.fsdp.flat_plan import FlatPlan
from lowshard.fsdp.param import Param
from lowshard.reading import READERS
from lowshard.reshard import build_reshard_plan
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.rules.golden import parse_dump
from lowshard.solver.graph.graph_file import EXAMPLES, load_graph
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load_sharded, saved_tilings
from lowshard.weights.checkpoint_convert import convert
from lowshard.weights.convert_plan import Settings
from lowshard.weights.name_pattern import NamePatterns

_MESH = DeviceMesh((2, 2), ("dp", "tp"), {0: 1e9, 3: 2e9}, ranks=(0, 1, 3, 2))


def import_everything() -> None:
    """Import every module that has a reader, so that it is registered."""
    root = Path(__file__).resolve().parents[2]
    for folder in ("lowshard", "launch", "bench"):
        package = folder if folder == "lowshard" else f"lowshard.{folder}"
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "reader(" in text and "reading" in text:
                parts = path.relative_to(root / folder).with_suffix("").parts
                importlib.import_module(".".join((package, *parts)))


def layout() -> Layout:
    """Return a layout that uses most of what one can say."""
    return Layout.from_spec(_MESH, (7, 6, 5), "bf16", (("tp",), None, None), "ceil", partial={"dp": "sum"})


def redistribution() -> Any:
    """Return a plan of several steps."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (5, 6), "float32", (Partial("sum"), Sharded(0)))
    return plan_redistribute(src, src.with_placements((Sharded(1), Replicated())))


def reshard() -> Any:
    """Return a plan over two kinds of layouts."""
    mesh, two = DeviceMesh((4,), ("x",)), DeviceMesh((2,), ("x",))
    tiles = Tiling.from_pieces(
        (6, 4), "int32", [[((0, 2), (0, 4)), ((4, 5), (0, 4))], [((2, 4), (0, 4)), ((5, 6), (0, 4))]]
    )
    src = {"a": Layout(mesh, (9, 4), "int32", (Sharded(0),)), "b": tiles}
    dst = {
        "a": Layout(two, (9, 4), "int32", (Sharded(1),)),
        "b": Layout(mesh, (6, 4), "int32", (Sharded(1),)),
    }
    return build_reshard_plan(src, dst)


def index() -> Index:
    """Return the index of two parts in two files."""
    a, b = "a.safetensors", "b.safetensors"
    parts = Part(a, "w", ((0, 2), (0, 3)), 7), Part(b, "w", ((2, 4), (0, 3)), None)
    files = {a: IndexedFile(100, 1), b: IndexedFile(200, 2)}
    tiling = Tiling.from_pieces((4, 3), "float32", [[((0, 2), (0, 3))], [((2, 4), (0, 3))]])
    tensor = IndexedTensor("float32", (4, 3), "rowwise(2)", parts, tiling, "00ff" * 8)
    return Index(2, "t0", files, {"w": tensor}, {"step": "3"})


def plain(data: Any) -> Any:
    """Return data as a file would give it."""
    return json.loads(json.dumps(data))


@cache
def samples() -> Mapping[str, Any]:
    """Return by reader what `to_json`, or a user, writes for it. A new reader is not in it: put one there."""
    flat = FlatPlan.plan([Param("w", (3, 5)), Param("b", (4,)), Param("s", ())], 2)
    op = {"op": "matmul", "in": ["x", "w"], "out": "y"}
    block = {"repeat": 2, "name": "l", "carry": {"x": "y"}, "weights": {"w": [4, 4]}, "ops": [op]}
    inputs = {"x": {"shape": ["n", 4], "place": "tp=S0"}}
    graph = {"name": "g", "sizes": {"n": 4}, "inputs": inputs, "ops": [block], "outputs": ["x"]}
    rule = {"pattern": "**.{q,k}_proj.weight", "strategy": {"axiswise": {"axis": 0}}}
    redistributed, moves = plain(redistribution().to_json()), plain(reshard().to_json())
    indexed = json.loads(index().encode())
    indexed.pop("digest")
    tensor = {"dtype": "bfloat16", "shape": [4, 3]}
    slot = {"step": 3, "state": {"lr": 0.1}}
    changed = {"w": {"dtype": "bfloat16", "shape": [4, 3], "base": "00", "digest": "01"}}
    delta = {"base": "0a", "digest": "0b", "base_version": 4, "tensors": changed}
    return {
        "mesh": plain(_MESH.to_json()),
        "layout": plain(layout().to_json()),
        "tiling": plain(Tiling.from_pieces((4, 3), "int32", [[((0, 2), (0, 3))], [((2, 4), (0, 3))]]).to_json()),
        "cluster profile": plain(ClusterProfile.default().to_json()),
        "sharding of a dim": DimSharding(12, 3, chunks=2, blocks=(6, 6)).to_json(),
        "tensor layout": moves["layouts"][1],
        "reshard plan": moves,
        "exchange": redistributed["steps"][0]["exchanges"][0],
        "redistribution plan": redistributed,
        "flat plan": json.loads(flat.to_json()),
        "graph file": graph,
        "op of a graph": op,
        "block of a graph": block,
        "model's config": {"num_attention_heads": 8, "num_key_value_heads": 2},
        "rule of a file of name patterns": rule,
        "file of name patterns": {"sizes": ["num_heads"], "rules": [rule, {"pattern": "*.b", "strategy": "replicate"}]},
        "index of a sharded checkpoint": indexed,
        "index with a weight_map": {"weight_map": {"w": "a.safetensors"}, "metadata": {"total_size": 7}},
        "head of a delta": delta,
        "state of FSDP.save": {"version": 1, "updates": 2, "arrays": {"l0": ["m"]}, "numbers": {"l0": slot}},
        "state of an optimizer's slot": slot,
        "greeting of a subscriber": {"name": "a", "host": "h", "pid": 3, "ranks": 2},
        "table of a publisher": {
            "publisher_id": "00ff", "layouts": {"w": moves["layouts"][1]},
            "endpoints": [{"addresses": ["unix:/a/listener"], "network": "n", "pid": 4}],
        },
        "request of a subscriber": {
            "ask": "read", "publisher_id": "00", "newer_than": 3, "wait_s": 0.5, "number": 2, "version": None,
            "boxes": [["w", [[[0, 2], [1, 3]]]]],
        },
        "tensor of a model to benchmark": tensor,
        "model to benchmark": {"tensors": {"w": tensor}, "num_attention_heads": 8, "num_key_value_heads": 2},
        "answer of a publisher": {"state": "here", "version": 1, "number": 2, "pid": 3, "fd": 4, "size_bytes": 5},
    }  # fmt: skip


def use(name: str, value: Any) -> None:
    """Ask a value what its users ask: it must answer, or say what is wrong."""
    again = getattr(type(value), "from_json", None)
    if again is not None:
        assert again(value.to_json()) == value, "what was read is not what is written"
    if isinstance(value, (DeviceMesh,)):
        value.coord(value.ranks[0])
    if isinstance(value, Layout):
        value.box(value.mesh.ranks[0])
        assert Layout.parse(value.mesh, str(value)) == value
    if isinstance(value, Tiling):
        assert isinstance(value.is_cover, bool)
    if isinstance(value, DimSharding):
        assert sum(value.extent(p) for p in range(min(value.parts, 4))) <= value.length
    if isinstance(value, TensorLayout):
        value.tiles(value.rank_map.span[0])
    if isinstance(value, ClusterProfile):
        for curve in value.curves:
            curve.seconds(3, 1000)
    if isinstance(value, FlatPlan):
        value.views(np.zeros(min(value.size, 1 << 20))) if value.size <= 1 << 20 else None


# ---- formats that are no JSON of ours: text to value


def _bound(path: Path) -> Any:
    graph, sizes = load_graph(path)
    return graph.bind(sizes)


def _dump(path: Path) -> Any:
    dump = parse_dump(path.read_bytes().decode("latin-1"))
    return {"logical": dump.tensors, "activations": dump.activations}.get(dump.kind, lambda: None)()


def _user_model(path: Path) -> Any:
    """Read a config.json that lies beside a checkpoint of a BERT's."""
    model = path.with_name("model.safetensors")
    if not model.exists():
        save_file({"embeddings.word_embeddings.weight": np.zeros((4, 6), np.float32)}, model)
    return user_checkpoint(model)


SHARD = "shard-00002-model-00001-of-00001.safetensors"
_VALUES = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(5),
    "c": np.zeros((0, 2), np.int8),
}


@cache
def _sharded() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a sharded checkpoint of two ranks, for as long as this process lives."""
    folder = tempfile.TemporaryDirectory()
    tilings = {n: ShardingStrategy.rowwise(2).layout(a.shape, a.dtype.name) for n, a in _VALUES.items()}
    save_over(Path(folder.name) / "c", _VALUES, tilings, 2)
    return folder


def _index_text() -> bytes:
    return (Path(_sharded().name) / "c" / INDEX_NAME).read_bytes()


def _indexed(path: Path) -> None:
    """Put an index among the files of a checkpoint, with the digest that it should have, and use the checkpoint."""
    folder = Path(_sharded().name) / "c"
    text = path.read_bytes()
    # Where there is none, the text goes as it is.
    with suppress(ValueError, TypeError, RecursionError, AttributeError):
        body = json.loads(text)
        body.pop("digest", None)
        text = json.dumps({**body, "digest": index_digest(body)}).encode()
    (folder / INDEX_NAME).write_bytes(text)
    use_checkpoint(folder)


def _hugging_face(path: Path) -> None:
    """Use a folder of two files and an index of Hugging Face's."""
    save_file({"a": _VALUES["a"], "c": _VALUES["c"]}, path.with_name("1.safetensors"))
    save_file({"b": _VALUES["b"]}, path.with_name("2.safetensors"))
    path.rename(path.with_name(HF_INDEX))
    use_checkpoint(path.parent)


def _torch(path: Path) -> None:
    """Use one of torch's folders with a file of it replaced."""
    kind = "shards" if path.suffix == ".safetensors" else "dcp"
    data = path.read_bytes()
    shutil.copytree(DATA / "torch" / kind, path.parent / kind, dirs_exist_ok=True)
    (path.parent / kind / path.name).write_bytes(data)
    use_checkpoint(path.parent / kind)


def use_checkpoint(path: Path) -> None:
    """Do with a checkpoint all that needs nothing but its files: show it, compare checksums, load it, merge it."""
    overview = look_at(path)
    overview = verified(overview, list(overview.catalog.tensors), lambda size_bytes: None)
    json.dumps(overview.to_json())
    catalog = Catalog.open(path)
    arrays = load_sharded(path)
    assert set(arrays) == set(catalog.tensors)
    for name, tiling in saved_tilings(catalog, 3).items():
        assert tiling.shape == catalog.tensors[name].shape
    target = Path(_sharded().name) / "merged.safetensors"
    settings = Settings(str(path), str(target), None, "", merged=True)
    run_loopback(1, lambda comm: convert(settings, comm))
    merged = load_sharded(target)
    assert {n: a.tobytes() for n, a in merged.items()} == {n: a.tobytes() for n, a in arrays.items()}


def texts() -> Mapping[str, tuple[Callable[[], bytes], Callable[[Path], Any]]]:
    """Return, by format, what makes a sound file, and what reads one."""
    named = {"mesh": {"axis_names": ["x"], "shape": {"x": 2}}, "partition_spec": ["x", None], "shape": [4, 2]}
    in_files = {name: "2.safetensors" if name == "b" else "1.safetensors" for name in _VALUES}
    flowing = {"f/v: bf16[4,2]": {"logic_axes": "('a', None)", "PartitionSpec": "P('x', None)"}}
    dumps: dict[str, Any] = {
        "logical": {"params.w": {"partition_spec": ["embed", None], "shape": [4, 5]}},
        "named": {"w": named, "v": named}, "activations": {"Activation Sharding Dump": [flowing]},
    }  # fmt: skip
    return {
        "graph.yaml": ((EXAMPLES / "mlp.yaml").read_bytes, _bound),
        "names.yaml": (
            (Path(lowshard.__file__).parent / "weights/names/llama.yaml").read_bytes,
            lambda path: NamePatterns.load(path).match(["model.layers.0.self_attn.q_proj.weight"]),
        ),
        "layout.txt": (
            lambda: str(layout()).encode(),
            lambda path: Layout.parse(_MESH, path.read_bytes().decode("latin-1")),
        ),
        **{
            f"{kind}.json": (lambda data=data: json.dumps(data).encode(), _dump)
            for kind, data in dumps.items()
        },
        "profile.json": (
            lambda: json.dumps(ClusterProfile.default().to_json()).encode(),
            ClusterProfile.load,
        ),
        "config.json": (lambda: json.dumps(SYNTHETIC_CONFIG.to_json()).encode(), _user_model),
        "index.json": (_index_text, _indexed),
        "hugging_face.json": (lambda: json.dumps({"weight_map": in_files}).encode(), _hugging_face),
        **{
            name: ((DATA / "torch" / kind / name).read_bytes, _torch)
            for kind, name in (("dcp", ".metadata"), ("dcp", "__0_0.distcp"), ("shards", SHARD))
        },
        "plain.safetensors": (lambda: save(_VALUES, {"format": "np"}), use_checkpoint),
    }


def unknown_readers() -> set[str]:
    """Return what the registry has and the samples have not, or the other way round."""
    import_everything()
    return set(READERS) ^ set(samples())
