"""Chains of deltas, whatever versions and contents they have, and writers of deltas that meet in one place."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import mode

from lowshard.checkpoint import Catalog, Delta, delta_writer, open_deltas, write_delta
from lowshard.checkpoint.delta_file import chain_of
from lowshard.checkpoint.hf_index import HF_INDEX
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import CheckpointError
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, load_sharded, patched_source, save
from lowshard.weights.patched_source import PatchedSource

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


def foreign_folder(path: Path, version: int, before: np.ndarray, after: np.ndarray) -> Path:
    """Write a delta as another project does, without digests."""
    path.mkdir(parents=True)
    flipped = before.view(np.uint8) ^ after.view(np.uint8)
    packed = np.frombuffer(zlib.compress(flipped.tobytes()), np.uint8)
    save_file({"w": packed}, path / "d.safetensors", {"w": f"{zlib.adler32(after.tobytes()):08x}"})
    said = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": "xor",
        "compression_format": "zlib", "checksum_format": "adler32",
    }  # fmt: skip
    (path / HF_INDEX).write_text(json.dumps({"metadata": said, "weight_map": {"w": "d.safetensors"}}))
    return path


def foreign_file(path: Path, version: int, value: float, at: int) -> Path:
    """Write a sparse delta as another project does, which says nothing of what it stands on."""
    said = {"sparse": "true", "model_version": str(version), "changed_params": "1"}
    data = {"w.indices": np.array([at], np.int32), "w.values": np.full(1, value, np.float32)}
    save_file(data, path, said)
    return path


# ---- chains


@pytest.mark.parametrize("names", [("a.safetensors", "b.safetensors"), ("weight_v000005", "weight_v000002")])
def test_versions_that_do_not_rise_leave_no_delta_out(tmp_path: Path, names: tuple[str, str]) -> None:
    v0, v1, v2 = saved(tmp_path, (0, 1, 2))
    one, two = (tmp_path / name for name in names)
    write_delta(v0, v1, one)
    write_delta(v1, v2, two)
    for given in ([one, two], [two, one]):
        assert apply_deltas(v0, given, tmp_path / "out").applied == 2
        assert value_of(tmp_path / "out") == 2


@pytest.mark.parametrize("values", [(0, 1, 1, 2), (0, 1, 0, 2), (0, 1, 0), (0, 0)])
def test_content_may_stay_and_come_back(tmp_path: Path, values: Sequence[float]) -> None:
    paths = saved(tmp_path, values)
    for number, (before, after) in enumerate(itertools.pairwise(paths), 1):
        write_delta(before, after, tmp_path / "deltas" / f"weight_v{number:06d}")
    assert apply_deltas(paths[0], [tmp_path / "deltas"], tmp_path / "out").applied == len(values) - 1
    for base in paths[:-1]:
        apply_deltas(base, [tmp_path / "deltas"], tmp_path / "out")
        assert value_of(tmp_path / "out") == values[-1]


def _delta(version: int, before: str, after: str, is_own: bool = True) -> Delta:
    digests = (before, after) if is_own else (None, None)
    return Delta(f"{version}: {before}{after}", version, version - 1, *digests, "xor", "none", None, {})


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
                at = delta.digest or ""
            rises = all(a.version < b.version for a, b in itertools.pairwise(chain))
            assert at == contents[-1] or not rises, (contents, base, given)
            if len(given) == len(deltas):
                assert at == contents[-1]


def test_what_no_link_leads_to_is_refused() -> None:
    a, b, c, d = (_delta(i, x, y) for i, (x, y) in enumerate(itertools.pairwise("ABCDE"), 1))
    assert chain_of([a, b, c, d], "C", "base") == (c, d)
    with pytest.raises(CheckpointError, match=r"a link of the chain is missing: 1: AB .* makes D"):
        chain_of([a, c], "C", "base")
    with pytest.raises(CheckpointError, match=r"a link of the chain is missing: 4: DE"):
        chain_of([a, b, d], "C", "base")
    with pytest.raises(CheckpointError, match=r"1: AB and 2: AD stand on the same version \(A\)"):
        chain_of([a, _delta(2, "A", "D"), b], "B", "base")
    with pytest.raises(CheckpointError, match=r"leads back to base, .* have version 1; give each its own"):
        chain_of([_delta(1, "A", "B"), _delta(1, "B", "A")], "A", "base")


def test_foreign_deltas_begin_a_chain_and_end_one(tmp_path: Path) -> None:
    paths = saved(tmp_path, (0, 1, 2, 3))
    one = foreign_folder(tmp_path / "f1", 1, of(0), of(1))
    two = foreign_folder(tmp_path / "f2", 2, of(1), of(2))
    own = [tmp_path / f"weight_v{number:06d}" for number in (1, 2, 3)]
    for path, (before, after) in zip(own, itertools.pairwise(paths), strict=True):
        write_delta(before, after, path)
    for given, base, applied in (
        ([one, two, own[2]], 0, 3), ([one, own[1], own[2]], 0, 3), ([own[0], two, own[2]], 0, 3),
        ([one, two, own[2]], 2, 1), ([own[0], two, own[2]], 1, 2),
    ):  # fmt: skip
        assert apply_deltas(paths[base], given, tmp_path / "out").applied == applied
        assert value_of(tmp_path / "out") == 3


def test_foreign_versions_follow_one_another(tmp_path: Path) -> None:
    (base,) = saved(tmp_path, (0,))
    again = foreign_folder(tmp_path / "again", 1, of(0), of(3))
    one = foreign_folder(tmp_path / "f1", 1, of(0), of(1))
    with pytest.raises(CheckpointError, match=r"f1 and .*again stand on the same version \(version 0\)"):
        apply_deltas(base, [one, again], tmp_path / "out")
    five = foreign_file(tmp_path / "5.safetensors", 5, 5.0, 0)
    also = foreign_file(tmp_path / "also5.safetensors", 5, 9.0, 1)
    six = foreign_file(tmp_path / "6.safetensors", 6, 6.0, 1)
    seven = foreign_file(tmp_path / "7.safetensors", 7, 7.0, 2)
    with pytest.raises(CheckpointError, match="stand on the same version"):
        apply_deltas(base, [five, also], tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"a link of the chain is missing: .*7.safetensors .* version 6"
    ):
        apply_deltas(base, [five, seven], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert apply_deltas(base, [seven, five, six], tmp_path / "out").applied == 3


# ---- writers


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("name", ["d.safetensors", "d"])
def test_of_two_writers_of_one_delta_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_links: bool
) -> None:
    v0, v1, v2 = saved(tmp_path, (0, 1, 2))
    (tmp_path / "to").mkdir()
    path = tmp_path / "to" / name
    gate, arrived = threading.Event(), threading.Event()
    write, slow = delta_writer._Writer.write, threading.current_thread()

    def slowly(self: Any) -> Any:
        if threading.current_thread() is not slow:
            arrived.set()
            gate.wait(60)
        return write(self)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(delta_writer._Writer, "write", slowly)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
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
    names = {p.name for p in (path if path.is_dir() else path.parent).iterdir()}
    assert len(names) == (2 if path.is_dir() else 1), names


def test_the_folder_of_a_checkpoint_becomes_no_delta(tmp_path: Path) -> None:
    v0, v1 = saved(tmp_path, (0, 1))
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({"w": of(1)}, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights.safetensors: is there already, .* another folder"):
        write_delta(v0, v1, folder)
    assert [p.name for p in folder.iterdir()] == ["weights.safetensors"]
    Catalog.open(folder)
    with pytest.raises(CheckpointError, match="is there already"):
        write_delta(v0, v1, v1)
    # what a killed writer has left is no reason
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "delta-0123456789ab.safetensors").write_bytes(b"half")
    write_delta(v0, v1, tmp_path / "d")
    assert len(list((tmp_path / "d").iterdir())) == 2


def test_places_that_the_system_refuses_are_errors_of_ours(tmp_path: Path) -> None:
    v0, v1 = saved(tmp_path, (0, 1))
    for name in ("n" * 300, "n" * 300 + ".safetensors"):
        with pytest.raises(CheckpointError, match="name too long"):
            write_delta(v0, v1, tmp_path / name)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Not a directory"):
        write_delta(v0, v1, tmp_path / "file")


def test_a_folder_of_deltas_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="this folder of deltas cannot be read: Permission denied"):
        open_deltas([tmp_path])


def test_the_number_in_a_name_counts_however_many_digits_it_has(tmp_path: Path) -> None:
    paths = saved(tmp_path, (0, 1, 2))
    for number, name in ((1, "weight_v1"), (2, "weight_v02")):
        report = write_delta(paths[number - 1], paths[number], tmp_path / "deltas" / name)
        assert (report.version, report.base_version) == (number, number - 1)
    assert apply_deltas(paths[0], [tmp_path / "deltas"], tmp_path / "out").applied == 2
    for version, before in ((2, 2), (2, 3), (0, 1), (2, -1)):
        with pytest.raises(CheckpointError, match="base_version is a number of 0 or more, below the version"):
            write_delta(paths[0], paths[1], tmp_path / "d", version=version, base_version=before)


@pytest.mark.parametrize("form", ["sparse", "folder"])
def test_a_delta_whose_file_is_replaced_once_it_was_opened_is_not_read(tmp_path: Path, form: str) -> None:
    if form == "sparse":
        file = foreign_file(tmp_path / "d.safetensors", 1, 1.0, 0)
        opened, other = Delta.open(file), foreign_file(tmp_path / "e.safetensors", 2, 2.0, 3)
    else:
        file = foreign_folder(tmp_path / "d", 1, of(0), of(1)) / "d.safetensors"
        opened = Delta.open(tmp_path / "d")
        other = foreign_folder(tmp_path / "e", 2, of(0), of(2)) / "d.safetensors"
    assert opened.patch("w", "float32", (8,)).bits.size
    other.replace(file)
    with pytest.raises(CheckpointError, match="the file was replaced or changed since the delta was opened"):
        opened.patch("w", "float32", (8,))


def test_what_a_chain_changes_of_a_tensor_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base,) = saved(tmp_path, (0,))
    chain = [foreign_file(tmp_path / f"{n}.safetensors", n, n, n) for n in (1, 2, 3)]
    made = PatchedSource._patches
    bytes_of_two = 2 * Delta.open(chain[0]).patch("w", "float32", (8,)).size_bytes

    def with_less(source: PatchedSource, name: str) -> Any:
        source._most_bytes = bytes_of_two // patched_source.ALONE
        return made(source, name)

    monkeypatch.setattr(PatchedSource, "_patches", with_less)
    with pytest.raises(
        CheckpointError, match=r"3.safetensors: tensor 'w': what the first 3 deltas change of it"
    ):
        apply_deltas(base, chain, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    apply_deltas(base, chain[:2], tmp_path / "out")
    apply_deltas(tmp_path / "out", chain[2:], tmp_path / "out")
    assert load_sharded(tmp_path / "out")["w"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_names_that_are_none_are_told(tmp_path: Path) -> None:
    v0, v1 = saved(tmp_path, (0, 1))
    write_delta(v0, v1, tmp_path / "d")
    delta = Delta.open(tmp_path / "d")
    wrong: Any = [None, 7, "a/path"]
    for given in wrong:
        with pytest.raises(CheckpointError, match="deltas are a sequence of paths"):
            open_deltas(given)
    for call in (delta.patch, delta.check_tensor):
        with pytest.raises(CheckpointError, match="tensor 'x': the delta changes none of that name"):
            call("x", "float32", (8,))
        name: Any = []
        with pytest.raises(CheckpointError, match="a tensor's name is text"):
            call(name, "float32", (8,))


def test_wrong_arguments_of_one_rank_are_told_on_all(tmp_path: Path) -> None:
    base, delta = saved(tmp_path, [0.0]), foreign_file(tmp_path / "d.safetensors", 1, 2.0, 0)
    right = {"base": base[0], "deltas": [delta], "path": tmp_path / "out", "memory_bytes": 2_000_000_000}
    for wrong in ({"deltas": []}, {"deltas": [5]}, {"path": 5}, {"base": ""}, {"memory_bytes": "2GB"}):

        def job(comm: Communicator, wrong: Any = wrong) -> None:
            with pytest.raises(CheckpointError, match=r"apply_deltas: rank 1: .*, got"):
                apply_deltas(**(right | wrong if comm.rank else right), comm=comm)  # type: ignore[arg-type]

        run_loopback(2, job, 10)
    assert not (tmp_path / "out").exists()
