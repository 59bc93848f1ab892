"""`load_sharded`: checkpoints loaded without patterns, by what their index says of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints import attention_and_more, local_of, on_ranks, same, save_over, values_of

from lowshard import comm as lc
from lowshard.checkpoint import Catalog
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.checkpoint_index import _digest as digest_of
from lowshard.cli import main
from lowshard.errors import CheckpointError, LowshardError, MismatchError
from lowshard.kernels import quantize_mxfp8
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load_sharded, save
from lowshard.weights.shard_rules import Owned

S = ShardingStrategy


def tilings_of(ranks: int) -> dict[str, Tiling]:
    """Return tilings of every kind; one tensor is on one rank alone, one on half of them."""
    made = attention_and_more(ranks)
    made["expert"] = S(ranks, Owned(ranks - 1)).layout((6, 4))
    alone = S.replicate(max(ranks // 2, 1)).layout((5, 3), "bfloat16")
    made["half"] = alone.widened(ranks)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_as_many_ranks_hold_what_they_held(tmp_path: Path, ranks: int) -> None:
    tilings = tilings_of(ranks)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, ranks)
    for rank, local in enumerate(on_ranks(ranks, lambda c: load_sharded(tmp_path / "c", c))):
        for name, tiling in tilings.items():
            right = local_of(values[name], tiling, rank)
            assert (name in local) == (right is not None)
            assert right is None or same(local[name], right)
        assert dict(local.tilings) == tilings


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("saved", [2, 4])
def test_other_numbers_of_ranks_hold_everything_in_balanced_parts(
    tmp_path: Path, saved: int, ranks: int
) -> None:
    tilings = tilings_of(saved)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, saved)
    found = on_ranks(ranks, lambda c: load_sharded(tmp_path / "c", c))
    for rank, local in enumerate(found):
        for name, tiling in local.tilings.items():
            right = local_of(values[name], tiling, rank)
            assert (name in local) == (right is not None)
            assert right is None or same(local[name], right)
    if ranks == saved:
        return
    made = found[0].tilings
    assert all(tiling.is_cover and tiling.num_ranks == ranks for tiling in made.values())
    assert [made["norm"].local_shape(r) for r in range(ranks)] == [(600,)] * ranks  # whole, as it was
    assert [made["columns"].local_shape(r)[0] for r in range(ranks)] == [9] * ranks  # cut along the same dim
    parts = [made["columns"].local_shape(r)[1] for r in range(ranks)]
    assert sum(parts) == 35
    assert max(parts) - min(parts) <= 1
    assert list(made["expert"].ranks) == ([ranks - 1] if ranks < saved else [(saved - 1) * ranks // saved])


def test_what_was_loaded_is_saved_and_loaded_again(tmp_path: Path) -> None:
    tilings = tilings_of(4)
    values = values_of(tilings)
    save_over(tmp_path / "a", values, tilings, 4)

    def move(c: lc.Communicator) -> None:
        save(tmp_path / "b", load_sharded(tmp_path / "a", c).state, c)

    on_ranks(3, move)
    alone = load_sharded(tmp_path / "b")  # without a communicator: whole
    assert set(alone) == set(values)
    assert all(same(alone[n], v) for n, v in values.items())


def test_a_checkpoint_reshard_wrote_is_held_as_its_grid_says(tmp_path: Path) -> None:
    values = {
        f"{n}.weight": np.random.default_rng(i).random((64, 192), np.float32) for i, n in enumerate("abc")
    }
    save_file(values, tmp_path / "in.safetensors")
    (tmp_path / "s.yaml").write_text(
        "rules: [{pattern: a.weight, strategy: rowwise}, {pattern: b.weight, strategy: columnwise}, "
        "{pattern: c.weight, strategy: replicate}]"
    )
    command = ["reshard", str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "--to", "dp=2,tp=2", "--mxfp8",
               "--strategies", str(tmp_path / "s.yaml")]  # fmt: skip
    assert main(command) == 0
    right: dict[str, np.ndarray] = {}
    for name, value in values.items():
        q = quantize_mxfp8(value)
        right[name] = q.data.view(ml_dtypes.float8_e4m3fn)
        right[f"{name}_scale"] = q.scale.view(ml_dtypes.float8_e8m0fnu)
    found = on_ranks(4, lambda c: load_sharded(tmp_path / "out", c))
    for rank, local in enumerate(found):
        rows, columns = (
            slice(32 * (rank % 2), 32 * (rank % 2) + 32),
            slice(96 * (rank % 2), 96 * (rank % 2) + 96),
        )
        assert same(local["a.weight"], right["a.weight"][rows])
        assert same(local["a.weight_scale"], right["a.weight_scale"][rows])
        assert same(local["b.weight"], np.ascontiguousarray(right["b.weight"][:, columns]))
        assert same(local["c.weight"], right["c.weight"])
    # Over 4 parts 192 columns are 48 each, inside blocks of 32: parts are whole blocks, with their scales.
    for rank, local in enumerate(on_ranks(5, lambda c: load_sharded(tmp_path / "out", c))):
        codes, scales = local["b.weight"], local["b.weight_scale"]
        assert codes.shape[1] == 32 * scales.shape[1]
        assert scales.shape[1] == (2 if rank == 0 else 1)


@pytest.mark.parametrize("form", ["file", "folder", "merged"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_plain_files_are_cut_along_the_first_dim(tmp_path: Path, form: str, ranks: int) -> None:
    rng = np.random.default_rng(0)
    values = {"w": rng.random((7, 4)), "b": rng.random(5), "step": np.array(3), "nothing": np.zeros((0, 2))}
    path = tmp_path / "in.safetensors"
    save_file(values, path)
    if form == "folder":
        (tmp_path / "hf").mkdir()
        save_file({"w": values["w"]}, tmp_path / "hf" / "a.safetensors")
        save_file({n: v for n, v in values.items() if n != "w"}, tmp_path / "hf" / "b.safetensors")
        index = {"weight_map": {n: "a.safetensors" if n == "w" else "b.safetensors" for n in values}}
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
        path = tmp_path / "hf"
    elif form == "merged":
        path = tmp_path / "out"
        assert (
            main(["reshard", str(tmp_path / "in.safetensors"), str(path), "--merged", "--file-size", "100"])
            == 0
        )
    found = on_ranks(ranks, lambda c: load_sharded(path, c))
    for name in ("w", "b", "nothing"):
        assert same(np.concatenate([local[name] for local in found]), values[name])
        sizes = [len(local[name]) for local in found]
        assert max(sizes) - min(sizes) <= 1
    assert all(same(local["step"], values["step"]) for local in found)


def broken(change: Callable[[dict[str, Any]], None], folder: Path) -> None:
    path = folder / INDEX_NAME
    body = json.loads(path.read_text())
    del body["digest"]
    change(body)
    body["digest"] = digest_of(body)
    path.write_text(json.dumps(body))


def test_a_tiling_that_does_not_fit_its_tensor_is_refused(tmp_path: Path) -> None:
    tilings = {"a": S.rowwise(2).layout((4, 4)), "b": S.rowwise(2).layout((6, 4))}
    save_over(tmp_path / "c", values_of(tilings), tilings, 2)

    def swap(body: dict[str, Any]) -> None:
        body["tensors"]["a"]["tiling"], body["tensors"]["b"]["tiling"] = 1, 0

    def beyond(body: dict[str, Any]) -> None:
        body["tensors"]["a"]["tiling"] = 7

    for change, said in (
        (swap, r"its tiling is float32\[6,4\]"),
        (beyond, "the index has tilings 0 to 1, got 7"),
    ):
        broken(change, tmp_path / "c")
        with pytest.raises(CheckpointError, match=said):
            Catalog.open(tmp_path / "c")


def test_an_index_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    tilings = {"a": S.rowwise(2).layout((4, 4))}
    save_over(tmp_path / "c", values_of(tilings), tilings, 2)
    broken(lambda body: body.update(version=2), tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"reads version 3 of .*, the index is .* version 2"):
        load_sharded(tmp_path / "c")


def test_a_missing_file_is_named_on_every_rank(tmp_path: Path) -> None:
    tilings = tilings_of(3)
    save_over(tmp_path / "c", values_of(tilings), tilings, 3)
    gone = sorted((tmp_path / "c").glob("shard-*"))[1]
    gone.unlink()
    said: dict[int, str] = {}

    def try_it(c: lc.Communicator) -> None:
        try:
            load_sharded(tmp_path / "c", c)
        except LowshardError as error:
            said[c.rank] = f"{type(error).__name__} {error}"

    on_ranks(3, try_it)
    assert len(set(said.values())) == 1
    assert f"{gone}: the file is missing, lowshard.index.json names it" in said[2]
    assert said[2].startswith("CheckpointError")


def test_ranks_that_load_other_checkpoints_are_told(tmp_path: Path) -> None:
    tilings = tilings_of(2)
    for seed, name in enumerate("ab"):
        save_over(tmp_path / name, values_of(tilings, seed), tilings, 2)
    with pytest.raises(MismatchError):
        on_ranks(2, lambda c: load_sharded(tmp_path / "ab"[c.rank], c))
