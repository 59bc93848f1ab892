"""Checkpoints of many ranks: saved at one number, loaded at another, by every strategy; damage is found."""

from __future__ import annotations

import json
import mmap
import os
import threading
import weakref
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import mode
from support.checkpoints import attention_and_more, local_of, on_ranks, same, save_over, state_of, values_of

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.checkpoint import Catalog
from lowshard.comm import Communicator
from lowshard.comm.loopback import LoopbackTransport
from lowshard.comm.reach import Reach
from lowshard.errors import (
    BufferMismatchError,
    CheckpointError,
    LayoutError,
    MismatchError,
    PlanError,
)
from lowshard.tiling import Tiling
from lowshard.weights import LoadPlan, LoadReport, ShardingStrategy, load, plan_load, remove_leftovers, save
from lowshard.weights.load_plan import STRATEGIES

S = ShardingStrategy
INDEX = "lowshard.index.json"


def check_load(path: Any, values: dict[str, np.ndarray], tilings: dict[str, Tiling], plan: LoadPlan) -> None:
    size = plan.num_ranks
    reports: list[list[LoadReport]] = [[] for _ in range(size)]
    found = on_ranks(size, lambda c: load(path, plan, c, reports=reports[c.rank]))
    for rank in range(size):
        for name, tiling in tilings.items():
            right = local_of(values[name], tiling, rank)
            if right is None:
                assert name not in found[rank]
            else:
                assert same(found[rank][name], right), (name, rank, plan.strategy)
        assert reports[rank][0].read_bytes == plan.read_bytes(rank)
        assert reports[rank][0].sent_bytes == plan.sent_bytes(rank)
        own = plan.received_bytes(rank) + sum(
            plan.taken_bytes(r, rank) for r in plan.reads if r.reader == rank
        )
        assert own == plan.held_bytes(rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (4, 3), (3, 4), (2, 8), (4, 4)])
def test_saved_over_some_ranks_and_loaded_over_others(
    tmp_path: Path, strategy: Any, saved: int, loaded: int
) -> None:
    before, after = attention_and_more(saved), attention_and_more(loaded)
    values = values_of(before)
    save_over(tmp_path / "c", values, before, saved, strategies=dict.fromkeys(before, "some"))
    nodes = [r * 2 // loaded for r in range(loaded)]
    plan = plan_load(tmp_path / "c", after, loaded, strategy=strategy, nodes=nodes)
    check_load(tmp_path / "c", values, after, plan)
    for node in set(nodes):  # no byte is read twice on a node
        readers = [r for r in plan.reads if nodes[r.reader] == node]
        for name, tiling in after.items():
            count = np.zeros(tiling.shape, np.int8)
            for r in readers:
                if r.name == name:
                    count[tuple(slice(*i) for i in r.box)] += 1
            assert count.max(initial=0) <= 1
    if strategy == "node-leader":
        assert all(plan.read_bytes(r) == 0 for r in range(loaded) if r and nodes[r - 1] == nodes[r])
    if strategy == "root-scatter":
        assert plan.read_bytes(0) == sum(t.size_bytes for t in after.values())
        assert not any(plan.read_bytes(r) for r in range(1, loaded))
    assert "read MB" in plan.explain()


@pytest.mark.parametrize("merged", [False, True])
def test_files_are_plain_safetensors_and_hold_each_element_once(tmp_path: Path, merged: bool) -> None:
    tilings = {n: t for n, t in attention_and_more(3).items() if t.dtype != "float8_e4m3fn"}
    values = values_of(tilings)
    target = tmp_path / "c"
    save_over(target, values, tilings, 3, merged=merged, metadata={"made": "here"})
    total = sum(v.nbytes for v in values.values())
    if merged:
        found = {n: a for n, a in load_file(target).items() if tilings[n].dtype != "bfloat16"}
        assert all(same(a, values[n]) for n, a in found.items())
        assert Catalog.open(target).metadata == {"made": "here"}
    else:
        files = sorted(p.name for p in target.iterdir())
        assert files[0] == INDEX
        assert len(files) == 4
        assert sum((target / f).stat().st_size for f in files[1:]) < total + 3 * 4000
        assert all(len(load_file(target / f)) for f in files[1:])  # the library reads them
        sizes = [(target / f).stat().st_size for f in files[1:]]
        assert min(sizes) > 0.8 * max(sizes)  # what all hold is spread
        assert Catalog.open(target).tensors["qkv"].strategy is None
        assert Catalog.open(target).num_ranks == 3
    assert Catalog.open(target).size_bytes == total
    check_load(target, values, tilings, plan_load(target, tilings, 3))


def test_layouts_serve_as_tilings_and_ranks_may_take_no_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    value = {"w": rng.standard_normal((10, 6)).astype(np.float32), "b": rng.standard_normal(5)}
    save_file(value, tmp_path / "model.safetensors")
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layouts = {
        "w": Layout(mesh, (10, 6), "f32", (Sharded(1), Sharded(0))),
        "b": Layout(DeviceMesh((2,), ("x",)), (5,), "f64", (Replicated(),)),
    }
    plan = plan_load(tmp_path, layouts, 5)
    tilings = {n: Tiling.from_layout(lay, 5) for n, lay in layouts.items()}
    check_load(tmp_path, value, tilings, plan)
    alone = load(tmp_path, plan_load(tmp_path, {"w": Tiling.whole((10, 6), "f32")}))
    assert same(alone["w"], value["w"])


def test_a_hugging_face_folder_of_several_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = {f"t{i}": rng.standard_normal((7 + i, 5)).astype(np.float32) for i in range(6)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({n: v for n, v in values.items() if int(n[1]) < 3}, tmp_path / names[0])
    save_file({n: v for n, v in values.items() if int(n[1]) >= 3}, tmp_path / names[1])
    weight_map = {n: names[int(n[1]) >= 3] for n in values}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    tilings = {n: S.rowwise(3).layout(v.shape) for n, v in values.items()}
    for files in (tmp_path, index, [tmp_path / n for n in names]):
        check_load(files, values, tilings, plan_load(files, tilings))
    for wrong, said in (
        (weight_map | {"t0": names[1]}, "t0"), (weight_map | {"t9": names[0]}, "t9"),
        ({n: f for n, f in weight_map.items() if n != "t4"}, "t4"), (weight_map | {"t0": "../x.safetensors"}, "beside"),
        (weight_map | {"t0": "gone.safetensors"}, "gone"),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=said):
            Catalog.open(tmp_path)
    index.unlink()
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"one of 2 files.*fetch the rest"):
        Catalog.open(tmp_path)
    (tmp_path / names[0]).rename(tmp_path / "model-00001-of-00001.safetensors")
    assert set(Catalog.open(tmp_path).tensors) == {"t0", "t1", "t2"}
    for text in ("{}", "[", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="weight_map"):
            Catalog.open(tmp_path)


def test_one_file_a_rank_from_elsewhere(tmp_path: Path) -> None:
    tilings = {n: t for n, t in attention_and_more(3).items() if t.dtype not in ("bfloat16", "float8_e4m3fn")}
    values = values_of(tilings)
    files = [tmp_path / f"rank{r}.safetensors" for r in range(3)]
    for rank, file in enumerate(files):
        mine = {n: local_of(values[n], t, rank) for n, t in tilings.items()}
        save_file({n: a for n, a in mine.items() if a is not None}, file)
    catalog = Catalog.of_rank_files(files, tilings)
    after = {n: t for n, t in attention_and_more(4).items() if n in tilings}
    check_load(catalog, values, after, plan_load(catalog, after))
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors: tensor 'rows'.*another strategy"):
        Catalog.of_rank_files(files, tilings | {"rows": S.columnwise(3).layout((13, 6))})


# ---- what is refused


def outcomes(size: int, job: Any) -> list[BaseException | None]:
    def attempt(comm: Any) -> BaseException | None:
        try:
            job(comm)
        except Exception as error:
            return error
        return None

    return on_ranks(size, attempt)


def test_wrong_arguments_raise_on_all_ranks_alike(tmp_path: Path) -> None:
    tilings = attention_and_more(2)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, 2)
    plan = plan_load(tmp_path / "c", tilings)
    other = plan_load(tmp_path / "c", tilings, strategy="root-scatter")
    found = outcomes(2, lambda c: load(tmp_path / "c", plan if c.rank else other, c))
    assert [type(e) for e in found] == [MismatchError] * 2
    assert "ranks [0] have verify True, root-scatter over nodes" in str(found[0])
    assert "ranks [1] have verify True, own-slice over nodes" in str(found[1])
    found = outcomes(2, lambda c: load(tmp_path / "c", plan, c, verify=bool(c.rank)))
    assert [type(e) for e in found] == [MismatchError] * 2
    assert "ranks [0] have verify False, own-slice" in str(found[0])
    found = outcomes(3, lambda c: load(tmp_path / "c", plan, c))
    assert [type(e) for e in found] == [PlanError] * 3
    found = outcomes(2, lambda c: load(tmp_path / ("c" if c.rank else "gone"), plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 2
    assert "gone" in str(found[1])

    def bad(comm: Any) -> None:
        state = state_of(values, tilings, comm.rank)
        if comm.rank:
            state["rows"] = (tilings["rows"], np.zeros((1, 1), np.float32))
        save(tmp_path / "c", state, comm)

    found = outcomes(2, bad)
    assert [type(e) for e in found] == [BufferMismatchError] * 2
    hole = Tiling.from_pieces((4,), "f32", [[((0, 2),)], [((0, 2),)]])
    found = outcomes(2, lambda c: save(tmp_path / "d", {"w": (hole, np.zeros(2, np.float32))}, c))
    assert [type(e) for e in found] == [LayoutError] * 2
    check_load(tmp_path / "c", values, tilings, plan)
    with pytest.raises(CheckpointError, match=r"did you mean rows"):
        plan_load(tmp_path / "c", {"row": tilings["rows"]})
    with pytest.raises(CheckpointError, match=r"tensor 'rows' is float32\[13, 6\], it is to be"):
        plan_load(tmp_path / "c", {"rows": tilings["columns"]})
    with pytest.raises(PlanError, match="own-slice"):
        plan_load(tmp_path / "c", tilings, strategy="other")  # type: ignore[arg-type]


def test_a_plan_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    tilings = attention_and_more(2)
    save_over(tmp_path / "0", values_of(tilings), tilings, 2)
    save_over(tmp_path / "1", values_of(attention_and_more(1)), attention_and_more(1), 1)
    plan = plan_load(tmp_path / "0", tilings)
    found = outcomes(2, lambda c: load(tmp_path / "1", plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 2
    assert "make it anew" in str(found[0])


def test_a_plan_for_another_dtype_of_the_same_width_is_refused(tmp_path: Path) -> None:
    tilings = {"rows": S.rowwise(2).layout((13, 6), "float32")}
    save_over(tmp_path / "c", values_of(tilings), tilings, 2)
    other = (("rows", S.rowwise(2).layout((13, 6), "int32")),)
    plan = replace(plan_load(tmp_path / "c", tilings), tilings=other)
    found = outcomes(2, lambda c: load(tmp_path / "c", plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 2


# ---- damage


def damage(raw: bytes, where: str, rng: np.random.Generator, header_end: int) -> bytes:
    """Return damaged bytes: a flip in the header or the data, a cut, a tail, a run of other bytes."""
    data = bytearray(raw)
    first, last = {"header": (0, header_end), "data": (header_end, len(raw))}.get(where, (0, len(raw)))
    if where == "cut":
        return raw[: int(rng.integers(0, len(raw)))]
    if where == "tail":
        return raw + bytes(rng.integers(0, 256, int(rng.integers(1, 40)), dtype=np.uint8))
    at = int(rng.integers(first, last))
    if where == "burst":
        length = int(rng.integers(1, 64))
        data[at : at + length] = bytes(rng.integers(0, 256, len(data[at : at + length]), dtype=np.uint8))
    else:
        data[at] ^= 1 << int(rng.integers(0, 8))
    return bytes(data)


def test_damaged_files_are_never_loaded(tmp_path: Path, rng: np.random.Generator) -> None:
    """1,000 damaged files: each is a CheckpointError that names the file, and the tensor where it is known."""
    tilings = {n: t for n, t in attention_and_more(2).items() if n not in ("large", "wide")}
    values = values_of(tilings)
    folder = tmp_path / "c"
    save_over(folder, values, tilings, 2)
    files = sorted(p for p in folder.iterdir())
    good = {p: p.read_bytes() for p in files}
    whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in tilings.items()}
    plan = plan_load(folder, whole)
    kinds = ("header", "data", "cut", "tail", "burst")
    for number in range(5000 if mode.full() else 100):
        file = files[number % len(files)]
        where = kinds[number // len(files) % len(kinds)]
        raw = good[file]
        end = 8 + int.from_bytes(raw[:8], "little") if file.suffix == ".safetensors" else len(raw)
        bad = damage(raw, where if file.suffix == ".safetensors" or where != "data" else "burst", rng, end)
        if bad == raw:
            continue
        file.write_bytes(bad)
        for attempt in (lambda: load(folder, plan), lambda: load(folder, plan_load(folder, whole))):
            said, found = "", {}
            try:
                found = attempt()
            except CheckpointError as error:
                said = str(error)
            if found:  # damage without a meaning: white space of the index's JSON
                assert file.name == INDEX, (file.name, where)
                assert all(same(found[n], values[n]) for n in whole)
            else:
                assert str(folder) in said
                if where == "data" and file.suffix == ".safetensors":
                    assert "tensor '" in said
                    assert file.name in said
        file.write_bytes(raw)
    assert all(same(a, values[n]) for n, a in load(folder, plan).items())


def test_damaged_headers_of_a_plain_file_are_refused_or_harmless(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A plain file has no checksums, but its header cannot lead to other data than the right."""
    values = {f"layer.{i}.w": rng.random((5 + i, 8)).astype(np.float32) for i in range(6)}
    file = tmp_path / "model.safetensors"
    save_file(values, file, metadata={"format": "pt"})
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    whole = {n: Tiling.whole(v.shape, "float32") for n, v in values.items()}
    plan = plan_load(file, whole)
    count, refused = 3000 if mode.full() else 150, 0
    for number in range(count):
        bad = damage(raw, ("header", "cut", "tail")[number % 3], rng, end)
        file.write_bytes(bad)
        said, found = "", {}
        try:
            found = load(file, plan_load(file, whole) if number % 2 else plan)
        except CheckpointError as error:
            said = str(error)
        if found:
            assert all(same(found[n], v) for n, v in values.items())
        else:
            refused += 1
            assert str(file) in said
    assert refused > count // 10


def test_damage_seen_by_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    tilings = attention_and_more(4)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, 4)
    plan = plan_load(tmp_path / "c", tilings)
    file = sorted((tmp_path / "c").glob("shard*"))[2]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    found = outcomes(4, lambda c: load(tmp_path / "c", plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 4
    assert len({str(e) for e in found}) == 1
    assert file.name in str(found[0])
    assert "crc32" in str(found[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_cut_short_while_it_is_read_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    values = {"w": np.arange(4_000_000, dtype=np.float32).reshape(2000, 2000)}
    save_file(values, tmp_path / "model.safetensors")
    tilings = {"w": S.replicate(3).layout((2000, 2000))}
    plan = plan_load(tmp_path, tilings, strategy=strategy)
    real, cut = os.preadv, threading.Event()

    def cutting(fd: int, buffers: Any, offset: int) -> int:
        if offset > 4_000_000 and not cut.is_set():
            cut.set()
            os.truncate(tmp_path / "model.safetensors", 5_000_000)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cutting)
    found = outcomes(3, lambda c: load(tmp_path, plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 3
    assert "tensor 'w'" in str(found[0])


def test_progress_is_told_on_rank_0(tmp_path: Path) -> None:
    tilings = attention_and_more(2)
    save_over(tmp_path / "c", values_of(tilings), tilings, 2)
    plan = plan_load(tmp_path / "c", tilings)
    told: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    on_ranks(2, lambda c: load(tmp_path / "c", plan, c, progress=lambda a, b: told[c.rank].append((a, b))))
    assert told[1] == []
    assert told[0][-1] == (plan.read_bytes(0),) * 2
    assert told[0] == sorted(told[0])


# ---- saving over an old checkpoint


def test_leftovers_of_killed_saves_are_cleared_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    import fcntl

    tilings = attention_and_more(2)
    old = values_of(tilings)
    save_over(tmp_path / "c", old, tilings, 2)
    folder = tmp_path / "c"
    dead = [f"shard-{'ab' * 6}-00000-of-00002.safetensors", f".{INDEX}.{'ab' * 6}.tmp"]
    live = folder / f"shard-{'cd' * 6}-00001-of-00002.safetensors"
    claim = folder / f".{INDEX}.{'cd' * 6}.tmp"
    for name in (*dead, live.name):
        (folder / name).write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    with claim.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sorted(remove_leftovers(folder)) == sorted(dead)
        save_over(folder, values_of(tilings, 3), tilings, 2)
        assert live.exists()
        assert claim.exists()
    save_over(folder, values_of(tilings, 3), tilings, 2)
    assert not live.exists()
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".safetensors", ".safetensors", ".txt"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_killed_first_save_left_is_no_checkpoint(tmp_path: Path, ranks: int) -> None:
    tilings = {"w": S.rowwise(ranks).layout((4, 3))}
    save_over(tmp_path / "c", values_of(tilings), tilings, ranks)
    for path in (tmp_path / "c").glob("*.json"):
        path.unlink()
    assert len(list((tmp_path / "c").iterdir())) == ranks  # whose data may not be written yet
    with pytest.raises(CheckpointError, match=f"{INDEX}, which says of what, is missing"):
        Catalog.open(tmp_path / "c")


def test_nothing_is_cleared_beside_an_index_that_cannot_be_read_until_a_new_one_is_in_place(
    tmp_path: Path,
) -> None:
    tilings = attention_and_more(2)
    save_over(tmp_path / "c", values_of(tilings), tilings, 2)
    index = tmp_path / "c" / INDEX
    index.write_bytes(index.read_bytes()[:-9])
    before = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert remove_leftovers(tmp_path / "c") == []
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == before
    save_over(tmp_path / "c", values_of(tilings, 2), tilings, 2)
    after = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert len(after) == len(before)
    assert set(after) & set(before) == {INDEX}
    check_whole(tmp_path / "c", values_of(tilings, 2), tilings)


def check_whole(folder: Path, values: Any, tilings: Any) -> None:
    whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in tilings.items()}
    found = load(folder, plan_load(folder, whole))
    assert all(same(found[n], values[n]) for n in whole)


@pytest.mark.parametrize("locks", [True, False])
def test_two_saves_into_one_folder_at_once_end_with_one_of_both_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Without locks a save may lose its claim to the other: then it says so, and what is in place stays whole."""
    import fcntl

    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    tilings = {n: t for n, t in attention_and_more(2).items() if n not in ("large", "wide")}
    folder, found = tmp_path / "c", []

    def many(who: int) -> None:
        for turn in range(12):
            values = values_of(tilings, 10 * turn + who)
            errors = outcomes(2, lambda c, v=values: save(folder, state_of(v, tilings, c.rank), c))
            found.extend(e for e in errors if e is not None)

    threads = [threading.Thread(target=many, args=(who,)) for who in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not (locks and found), found
    assert all(isinstance(e, CheckpointError) for e in found), found
    whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in tilings.items()}
    assert len(load(folder, plan_load(folder, whole))) == len(whole)  # checksums compared
    save_over(folder, values_of(tilings, 3), tilings, 2)
    assert len(list(folder.iterdir())) == 3
    check_whole(folder, values_of(tilings, 3), tilings)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilings = attention_and_more(2)
    save_over(tmp_path / "c", values_of(tilings, 1), tilings, 2)
    module = import_module("lowshard.checkpoint.catalog")
    real = module.read_index
    saves = [2]

    def reading(path: Path) -> Any:
        index = real(path)
        if saves:
            save_over(tmp_path / "c", values_of(tilings, saves.pop()), tilings, 2)
        return index

    monkeypatch.setattr(module, "read_index", reading)
    check_whole(tmp_path / "c", values_of(tilings, 2), tilings)
    assert not saves


def test_a_checkpoint_that_is_replaced_before_it_is_loaded_is_named(tmp_path: Path) -> None:
    tilings = attention_and_more(2)
    save_over(tmp_path / "c", values_of(tilings, 1), tilings, 2)
    catalog = Catalog.open(tmp_path / "c")
    plan = plan_load(catalog, tilings)
    save_over(tmp_path / "c", values_of(tilings, 2), tilings, 2)
    found = outcomes(2, lambda c: load(catalog, plan, c))
    assert [type(e) for e in found] == [CheckpointError] * 2
    assert "a newer save has replaced the checkpoint since it was opened" in str(found[0])


def test_leftovers_of_killed_merged_saves_are_cleared(tmp_path: Path) -> None:
    dead = tmp_path / f".m.safetensors.{'ab' * 6}.tmp"
    dead.write_bytes(b"half")
    other = tmp_path / f".n.safetensors.{'ab' * 6}.tmp"
    other.write_bytes(b"another target's")
    tilings = attention_and_more(2)
    save_over(tmp_path / "m.safetensors", values_of(tilings), tilings, 2, merged=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "m.safetensors"]


@pytest.mark.parametrize("name", ["n" * 243 + ".safetensors", "\u00e9" * 127])
def test_names_as_long_as_the_system_has_them(tmp_path: Path, name: str) -> None:
    tilings = {"w": Tiling.whole((8,), "float32")}
    values = values_of(tilings)
    claims: list[str] = []
    sync = os.fsync

    def look(fd: int) -> None:
        claims.extend(p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp"))
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", look)
        save_over(tmp_path / name, values, tilings, 1, merged=True)
    assert claims
    (tmp_path / claims[0]).write_bytes(b"half")  # of a killed save
    save_over(tmp_path / name, values, tilings, 1, merged=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert same(load(tmp_path / name, plan_load(tmp_path / name, tilings))["w"], values["w"])


def test_what_is_no_file_is_not_replaced_and_no_folder_is_named_as_a_file(tmp_path: Path) -> None:
    state = {"w": (Tiling.whole((8,), "float32"), np.ones(8, np.float32))}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "to_nothing").symlink_to("gone")
    (tmp_path / "c" / INDEX).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name in ("pipe", "to_pipe"):
        with pytest.raises(CheckpointError, match="is not a regular file, and a save does not replace it"):
            save(tmp_path / name, state, merged=True)
    with pytest.raises(CheckpointError, match="is not a regular file, and a save does not replace it"):
        save(tmp_path / "c", state)
    for name in ("pipe", "to_nothing", "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"got the file .*; give a folder, or merged=True"):
            save(tmp_path / name, state)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "old.safetensors").mkdir()
    save(tmp_path / "old.safetensors", state)
    save(tmp_path / "to_nothing", state, merged=True)


def test_a_load_leaves_nothing_behind_with_the_communicator(tmp_path: Path) -> None:
    tiling = Tiling.whole((64, 64), "float32", 2)
    save(tmp_path / "c", {"w": (Tiling.whole((64, 64), "float32"), np.ones((64, 64), np.float32))})
    plan = plan_load(tmp_path / "c", {"w": tiling}, strategy="node-leader")

    def work(comm: Communicator) -> bool:
        array = load(tmp_path / "c", plan, comm)["w"]
        assert array.all()
        gone = weakref.ref(array)
        del array
        return gone() is None

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("nodes", [None, [0, 0, 1, 1, 1]])
def test_what_is_read_for_others_travels_by_messages_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[int] | None
) -> None:
    # As between machines, whose memory the others do not see: messages, and a group for each node.
    monkeypatch.setattr(LoopbackTransport, "new_reach", lambda comm: Reach(comm.rank, comm.size))
    monkeypatch.setattr("lowshard.weights.read_scatter.WINDOW_BYTES", 5000)
    tilings = attention_and_more(5)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, 5)
    for strategy in STRATEGIES:
        plan = plan_load(tmp_path / "c", tilings, 5, strategy=strategy, nodes=nodes)  # type: ignore[arg-type]
        check_load(tmp_path / "c", values, tilings, plan)


@pytest.mark.parametrize("ranks", [1, 3])
def test_mapped_arrays_are_the_files_pages_until_they_are_written_to(tmp_path: Path, ranks: int) -> None:
    tilings = attention_and_more(ranks)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, ranks)
    catalog = Catalog.open(tmp_path / "c")
    held = {f: Path(f).read_bytes() for f in catalog.files}
    plan = plan_load(catalog, tilings, ranks)
    found = on_ranks(ranks, lambda c: load(catalog, plan, c, mapped=True))
    count = 0
    for rank, arrays in enumerate(found):
        for name, array in arrays.items():
            right = local_of(values[name], tilings[name], rank)
            assert right is not None
            assert same(array, right)
            assert array.flags.writeable
            if isinstance(array.base, mmap.mmap):
                count += 1
                array.reshape(-1).view(np.uint8)[:] = 0  # this process's alone
    assert count >= 3 * ranks  # what is one run of a file, for this rank alone
    assert all(Path(f).read_bytes() == data for f, data in held.items())


def test_a_file_that_was_cut_short_is_not_mapped(tmp_path: Path) -> None:
    tilings = {"w": Tiling.whole((64, 64), "float32"), "v": Tiling.whole((8, 8), "float32")}
    save_over(tmp_path / "c", values_of(tilings), tilings, 1)
    catalog = Catalog.open(tmp_path / "c")
    file = Path(catalog.files[0])
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short after it was opened"):
        load(catalog, plan_load(catalog, tilings), verify=False, mapped=True)
    with pytest.raises(CheckpointError, match="cut short after it was opened"):
        load(catalog, plan_load(catalog, tilings), mapped=False)
