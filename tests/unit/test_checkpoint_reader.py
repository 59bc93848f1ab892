"""Reading by byte range: every rank gets its box, and the system is asked for not a byte more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.layouts import layouts

from lowshard import DeviceMesh, Layout, Partial, Sharded, dtypes
from lowshard.box import volume
from lowshard.checkpoint import CheckpointReader, plan_box, plan_read, read_header
from lowshard.checkpoint.header import encode_header
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError, MeshError

whole_layouts = layouts(partial=False)


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return an array of random bytes (of valid values for bool)."""
    row = dtypes.get(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, prod(shape) * row.itemsize_bytes, np.uint8)
    return (raw & 1 if row.kind == "bool" else raw).view(row.numpy).reshape(shape)


def put_file(path: Path, state: dict[str, np.ndarray]) -> None:
    """Write a file of any dtypes, without the library."""
    head, entries = encode_header({n: (a.dtype.name, a.shape) for n, a in state.items()})
    path.write_bytes(head + b"".join(state[e.name].tobytes() for e in entries))


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def sliced(value: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    # np.asarray: a slice of a 0-d array is a scalar
    return np.asarray(value[tuple(slice(a, b) for a, b in layout.box(rank))])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=whole_layouts, seed=st.integers(0, 2**32 - 1))
def test_every_rank_reads_its_slice_and_exactly_its_bytes(tmp_path: Path, layout: Layout, seed: int) -> None:
    value = random_array(layout.shape, layout.dtype, seed)
    state = {
        "before": random_array((3,), "int8", seed),
        "w": value,
        "after": random_array((5,), "bool", seed),
    }
    path = tmp_path / "f.safetensors"
    put_file(path, state)
    for rank in range(layout.mesh.size):
        with CheckpointReader(path) as reader:
            local = reader.read("w", layout, rank)
            assert same_bytes(local, sliced(value, layout, rank))
            assert local.flags.c_contiguous
            assert local.flags.writeable
            assert reader.bytes_read == layout.local_bytes(rank)
            assert reader.plan("w", layout, rank).total_bytes == layout.local_bytes(rank)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=whole_layouts)
def test_a_plan_names_each_byte_of_the_box_once_in_runs_that_do_not_touch(
    tmp_path: Path, layout: Layout
) -> None:
    put_file(
        path := tmp_path / "f", {"x": np.zeros(3, np.int64), "w": np.zeros(layout.shape, layout.numpy_dtype)}
    )
    entry = read_header(path).entry("w")
    index = np.arange(layout.size_elems).reshape(layout.shape)
    width = layout.itemsize_bytes
    for rank in range(layout.mesh.size):
        plan = plan_read(entry, layout, rank)
        assert hash(plan) == hash(plan_box(entry, layout.box(rank)))
        found = [byte for start, size in plan.runs for byte in range(start, start + size)]
        expected = [
            entry.start + int(i) * width + b for i in sliced(index, layout, rank).flat for b in range(width)
        ]
        assert found == expected
        assert all(a + plan.run_bytes < b for a, b in pairwise(plan.starts))


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Give the bytes and calls that the kernel counted for this process's reads within the block."""

    def snapshot() -> tuple[int, int, int]:
        fd = os.open("/proc/self/io", os.O_RDONLY)
        text = os.read(fd, 4096)
        os.close(fd)
        fields = dict(line.split(b": ") for line in text.splitlines())
        return int(fields[b"rchar"]), int(fields[b"syscr"]), len(text)

    found: list[int] = []
    bytes_before, calls_before, own = snapshot()
    yield found
    bytes_after, calls_after, _ = snapshot()
    found += [bytes_after - bytes_before - own, calls_after - calls_before - 1]


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this kernel keeps no /proc/self/io")
@pytest.mark.parametrize("spec", [("a", None), (None, "a"), (None, None)], ids=["rows", "columns", "whole"])
def test_the_kernel_counts_no_byte_beyond_the_box(tmp_path: Path, spec: Any) -> None:
    value = random_array((403, 96), "float32", 1)
    save_file({"w": value}, path := tmp_path / "f")
    layout = Layout.from_spec(DeviceMesh((4,), ("a",)), value.shape, "f32", spec)
    with CheckpointReader(path) as reader:
        plan = reader.plan("w", layout, 1)
        with counted_reads() as found:
            reader.read("w", layout, 1)
    assert found == [layout.local_bytes(1), len(plan.starts)]


def test_a_weight_can_be_cut_by_heads_in_another_shape(tmp_path: Path) -> None:
    value = random_array((384, 384), "float32", 3)
    save_file({"q": value}, path := tmp_path / "f")
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    heads = Layout.from_spec(mesh, (12, 32, 384), "f32", ("tp",))
    with CheckpointReader(path) as reader:
        for rank in range(4):
            local = reader.read("q", heads, rank, reshape=True)
            assert same_bytes(local, sliced(value.reshape(12, 32, 384), heads, rank))
        box = ((0, 12), (0, 16), (5, 7))
        found = reader.read_box("q", box, shape=(12, 32, 384))
        assert same_bytes(found, value.reshape(12, 32, 384)[:, :16, 5:7])
        text = r"f: tensor 'q' has shape \(384, 384\), .* \(12, 32, 384\);.*reshape=True"
        with pytest.raises(LayoutError, match=text):
            reader.read("q", heads, 0)
        assert reader.bytes_read == 4 * heads.local_bytes(0) + volume(box) * 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=whole_layouts, seed=st.integers(0, 2**32 - 1))
def test_a_tensor_read_in_any_other_shape_equals_the_reshaped_one(
    tmp_path: Path, layout: Layout, seed: int
) -> None:
    value = random_array(layout.shape, layout.dtype, seed)
    put_file(path := tmp_path / "f", {"w": value.reshape(-1)})
    with CheckpointReader(path) as reader:
        for rank in range(layout.mesh.size):
            assert same_bytes(reader.read("w", layout, rank, reshape=True), sliced(value, layout, rank))


def make(path: Path) -> Layout:
    save_file({"w": np.arange(24, dtype=np.float32).reshape(4, 6), "s": np.array(7)}, path)
    return Layout(DeviceMesh((2,), ("a",)), (4, 6), "f32", (Sharded(0),))


def test_a_layout_for_another_array_is_refused_with_both_named(tmp_path: Path) -> None:
    layout = make(path := tmp_path / "f")
    mesh = layout.mesh
    entry = read_header(path).entry("w")
    other_size = Layout(mesh, (4, 7), "f32", (Sharded(0),))
    other_dtype = Layout(mesh, (4, 6), "bf16", (Sharded(0),))
    terms = Layout(mesh, (4, 6), "f32", (Partial(),))
    other_shape = Layout(mesh, (6, 4), "f32", (Sharded(0),))
    with CheckpointReader(path) as reader:
        for reshape in (False, True):
            with pytest.raises(
                LayoutError, match=r"f: tensor 'w' has shape \(4, 6\) \(24 .* \(4, 7\) \(28 elements\)"
            ):
                reader.read("w", other_size, 0, reshape=reshape)
            with pytest.raises(LayoutError, match=r"tensor 'w' has shape \(4, 6\)"):
                plan_read(entry, other_size, 0, reshape=reshape)
        with pytest.raises(LayoutError, match="f: tensor 'w' is float32, the layout is for bfloat16"):
            reader.read("w", other_dtype, 0)
        with pytest.raises(LayoutError, match="is partial"):
            reader.read("w", terms, 0)
        with pytest.raises(LayoutError, match="reshape=True"):
            reader.read("w", other_shape, 0)
        with pytest.raises(MeshError, match="rank 2 is not in mesh"):
            reader.read("w", layout, 2)
        with pytest.raises(CheckpointError, match="f: tensor 'v' is not in the file"):
            reader.read("v", layout, 0)
        for box in (((0, 4),), ((0, 4), (0, 7)), ((3, 2), (0, 6)), ((-1, 2), (0, 6))):
            with pytest.raises(LayoutError, match=r"start <= stop <= extent for each dim of \(4, 6\)"):
                reader.read_box("w", box)
        with pytest.raises(LayoutError, match=r"\(5, 5\) \(25 elements\)"):
            reader.read_box("w", shape=(5, 5))
        assert reader.bytes_read == 0


def test_out_is_filled_in_place_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    layout = make(path := tmp_path / "f")
    out = np.empty((2, 6), np.float32)
    frozen = np.empty((2, 6), np.float32)
    frozen.flags.writeable = False
    with CheckpointReader(path) as reader:
        assert reader.read("w", layout, 1, out) is out
        assert out.tolist() == np.arange(12, 24).reshape(2, 6).tolist()
        scalar = np.zeros((), np.int64)
        assert reader.read_box("s", out=scalar) is scalar
        assert scalar == 7
        asked = reader.bytes_read
        cases: list[tuple[Any, str]] = [
            (np.empty((6, 2), np.float32), r"float32\[2, 6\], .* got float32\[6, 2\]"),
            (np.empty((2, 6), np.int32), "got int32"),
            (np.empty((2, 6), ">f4"), "got >f4"),
            (np.empty((6, 2), np.float32).T, "C-contiguous"),
            (frozen, "writeable"),
            ([0.0] * 12, "NumPy array, got list"),
        ]
        for bad, text in cases:
            with pytest.raises(BufferMismatchError, match=text):
                reader.read("w", layout, 1, bad)
        assert reader.bytes_read == asked


def test_a_closed_reader_says_so_and_closes_twice(tmp_path: Path) -> None:
    layout = make(path := tmp_path / "f")
    with CheckpointReader(path) as reader:
        assert reader.names == tuple(reader.header.tensors)
    reader.close()
    assert "closed" in repr(reader)
    with pytest.raises(CheckpointError, match="this reader is closed"):
        reader.read("w", layout, 0)


def test_a_file_cut_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    layout = make(path := tmp_path / "f")
    with CheckpointReader(path) as reader:
        os.truncate(path, reader.header.entry("w").start + 60)
        assert reader.read("w", layout, 0).tolist() == np.arange(12).reshape(2, 6).tolist()
        with pytest.raises(
            CheckpointError, match=r"f: tensor 'w': the file ends at byte \d+, .* 36 bytes: it was cut"
        ):
            reader.read("w", layout, 1)
        assert reader.bytes_read == 48 + 12


def test_a_file_put_in_its_place_is_not_seen(tmp_path: Path) -> None:
    layout = make(path := tmp_path / "f")
    with CheckpointReader(path) as reader:
        save_file({"w": np.zeros((4, 6), np.float32)}, other := tmp_path / "g")
        os.replace(other, path)
        assert reader.read("w", layout, 0).tolist() == np.arange(12).reshape(2, 6).tolist()


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = random_array((5, 40), "bfloat16", 4)
    put_file(path := tmp_path / "f", {"w": value})
    layout = Layout(DeviceMesh((2,), ("a",)), value.shape, "bf16", (Sharded(1),))
    real = os.preadv
    # the real call, asked for at most 7 bytes: what a signal or a network file system may do
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real(fd, [parts[0][:7]], at))
    with CheckpointReader(path) as reader:
        assert same_bytes(reader.read("w", layout, 1), value[:, 20:])
        assert reader.bytes_read == layout.local_bytes(1)


def test_threads_may_share_a_reader(tmp_path: Path) -> None:
    value = random_array((64, 32), "float16", 5)
    save_file({"w": value}, path := tmp_path / "f")
    layout = Layout(DeviceMesh((8,), ("a",)), value.shape, "f16", (Sharded(1),))
    found: dict[int, np.ndarray] = {}
    with CheckpointReader(path) as reader:
        threads = [
            threading.Thread(
                target=lambda r=rank: found.update({r: reader.read("w", layout, r)}), daemon=True
            )
            for rank in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert reader.bytes_read == value.nbytes
    assert all(same_bytes(found[rank], sliced(value, layout, rank)) for rank in range(8))
