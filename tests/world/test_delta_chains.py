"""Chains of deltas, whatever versions and contents they have, and writers of deltas that meet in one place."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support import mode

from lowshard.checkpoint import Catalog, Delta, delta_file, open_deltas, write_delta
from lowshard.checkpoint.delta_file import DeltaChain, chain_of
from lowshard.errors import CheckpointError
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, load_sharded, save

TILING = Tiling.whole((8,), "float32")


def of(value: float) -> np.ndarray:
    """Return what a version holds."""
    return np.full(8, value, np.float32)


def saved(folder: Path, values: Sequence[float]) -> list[Path]:
    """Save one checkpoint a value and return their paths."""
    made = [folder / f"v{number}" for number in range(len(values))]
    for path, value in zip(made, values, strict=True):
        save(path, {"w": (TILING, of(value))})
    return made


def value_of(path: Path) -> float:
    return float(load_sharded(path)["w"][0])


# ---- chains


def test_deltas_of_one_version_are_in_order_of_content(tmp_path: Path) -> None:
    v0, v1, v2 = saved(tmp_path, (0, 1, 2))
    one, two = (tmp_path / name for name in ("a.safetensors", "b.safetensors"))
    write_delta(v0, v1, one)
    write_delta(v1, v2, two)
    for given in ([one, two], [two, one]):
        assert apply_deltas(v0, given, tmp_path / "out").applied == 2
        assert value_of(tmp_path / "out") == 2


@pytest.mark.parametrize("values", [(0, 1, 1, 2), (0, 1, 0, 2), (0, 1, 0), (0, 0)])
def test_content_may_stay_and_come_back(tmp_path: Path, values: Sequence[float]) -> None:
    paths = saved(tmp_path, values)
    (tmp_path / "deltas").mkdir()
    for number, (before, after) in enumerate(itertools.pairwise(paths), 1):
        write_delta(before, after, tmp_path / "deltas" / f"weight_v{number:06d}.safetensors")
    assert apply_deltas(paths[0], [tmp_path / "deltas"], tmp_path / "out").applied == len(values) - 1
    for base in paths[:-1]:
        apply_deltas(base, [tmp_path / "deltas"], tmp_path / "out")
        assert value_of(tmp_path / "out") == values[-1]


def _delta(version: int, before: str, after: str) -> Delta:
    return Delta(f"{version}: {before}{after}", version, version - 1, before, after, {})


def attempt(deltas: Sequence[Delta], base: str) -> tuple[tuple[Delta, ...], str]:
    """Return the chain, or what is told instead."""
    try:
        return chain_of(deltas, base, "base"), ""
    except CheckpointError as error:
        return (), str(error)


def test_any_sequence_of_contents_leads_to_its_last() -> None:
    """From every version of every sequence of three contents; with links missing never to another content."""
    sequences = [s for n in range(2, 6) for s in itertools.product("ABC", repeat=n)]
    for contents in sequences if mode.full() else mode.sample(sequences, 120, "delta contents"):
        deltas = [_delta(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(contents), 1)]
        for base, kept in itertools.product(contents, range(1 << (len(deltas) - 1))):
            given = [*(d for i, d in enumerate(deltas[:-1]) if kept >> i & 1), deltas[-1]]
            chain, told = attempt(given, base)
            if told:
                is_newest = "is the newest version" in told
                assert base == contents[-1] if is_newest else len(given) < len(deltas), (contents, base)
                continue
            at = base
            for delta in chain:
                assert delta.base_digest == at
                at = delta.digest
            rises = all(a.version < b.version for a, b in itertools.pairwise(chain))
            assert at == contents[-1] or not rises, (contents, base, given)
            if len(given) == len(deltas):
                assert at == contents[-1]


def test_what_no_link_leads_to_is_refused() -> None:
    a, b, c, d = (_delta(i, x, y) for i, (x, y) in enumerate(itertools.pairwise("ABCDE"), 1))
    assert chain_of([a, b, c, d], "C", "base") == (c, d)
    assert chain_of([a, c], "C", "base") == (c,)  # what is older than the base is left out
    with pytest.raises(CheckpointError, match=r"no delta stands on that: 4: DE"):
        chain_of([a, b, d], "C", "base")
    with pytest.raises(CheckpointError, match=r"two stand on the same version: 2: AD"):
        chain_of([a, _delta(2, "A", "D"), b], "B", "base")


# ---- writers


def test_of_two_writers_of_one_delta_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v0, v1, v2 = saved(tmp_path, (0, 1, 2))
    (tmp_path / "to").mkdir()
    path = tmp_path / "to" / "d.safetensors"
    gate, arrived = threading.Event(), threading.Event()
    write, slow = delta_file._write, threading.current_thread()

    def slowly(*args: Any) -> Any:
        if threading.current_thread() is not slow:
            arrived.set()
            gate.wait(60)
        return write(*args)

    monkeypatch.setattr(delta_file, "_write", slowly)
    found: list[str] = []

    def late() -> None:
        try:
            write_delta(v0, v1, path)
        except CheckpointError as error:
            found.append(str(error))

    thread = threading.Thread(target=late)
    thread.start()
    assert arrived.wait(60)
    write_delta(v1, v2, path, version=9)
    gate.set()
    thread.join()
    assert "is there already; a delta is never replaced" in found[0]
    assert Delta.open(path).version == 9
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_of_deltas_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="this folder of deltas cannot be read: Permission denied"):
        open_deltas([tmp_path])


def test_a_delta_whose_file_is_replaced_once_it_was_opened_is_not_read(tmp_path: Path) -> None:
    paths = saved(tmp_path, (0, 1, 2))
    for number in (1, 2):
        write_delta(paths[0], paths[number], tmp_path / f"{number}.safetensors")
    opened = Delta.open(tmp_path / "1.safetensors")
    assert opened.patch("w").bits.size
    (tmp_path / "2.safetensors").replace(tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError, match="the file was replaced or changed since"):
        opened.patch("w")


def test_a_tensor_of_more_elements_than_int32_counts_has_int64_positions(tmp_path: Path) -> None:
    v0, v1 = saved(tmp_path, (0, 1))
    path = tmp_path / "d.safetensors"
    write_delta(v0, v1, path)
    with safe_open(path, "np") as file:
        data, said = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    assert data["w.indices"].dtype == np.int32
    save_file(data | {"w.indices": data["w.indices"].astype(np.int64)}, path, said)
    apply_deltas(v0, [path], tmp_path / "out")
    assert value_of(tmp_path / "out") == 1


def test_what_a_chain_changes_of_a_tensor_fits_into_memory(tmp_path: Path) -> None:
    base, *paths = saved(tmp_path, (0, 1, 2, 3))
    chain = [tmp_path / f"{n}.safetensors" for n in (1, 2, 3)]
    for path, (before, after) in zip(chain, itertools.pairwise([base, *paths]), strict=True):
        write_delta(before, after, path)
    digests = Catalog.open(base).digests or {}
    memory_bytes = 4 * Delta.open(chain[0]).patch("w").size_bytes
    assert DeltaChain.of(open_deltas(chain[:2]), digests, "base", memory_bytes).last("w")
    with pytest.raises(CheckpointError, match=r"3.safetensors: tensor 'w': .* apply fewer deltas at a time"):
        DeltaChain.of(open_deltas(chain), digests, "base", memory_bytes)


def test_patches_that_do_not_fit_together_are_read_again(tmp_path: Path) -> None:
    tilings = {name: Tiling.whole((8,), "float32") for name in "abc"}
    for number in (0, 1):
        save(tmp_path / f"v{number}", {n: (t, of(number)) for n, t in tilings.items()})
    write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d.safetensors")
    deltas, digests = open_deltas([tmp_path / "d.safetensors"]), Catalog.open(tmp_path / "v0").digests or {}
    chain = DeltaChain.of(deltas, digests, "v0", 2 * deltas[0].patch("a").size_bytes)
    for name in "abcabc":
        values = of(0)
        chain.apply(name, ((0, 8),), values)
        assert np.array_equal(values, of(1))
        assert len(chain._patches) == 1
