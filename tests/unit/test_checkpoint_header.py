"""The safetensors header: what the library writes is understood, what the format forbids is refused."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from lowshard import dtypes
from lowshard.checkpoint import CheckpointReader, read_header
from lowshard.checkpoint.header import MAX_HEADER_BYTES, encode_header
from lowshard.errors import CheckpointError

PLAIN = [row for row in dtypes.all_dtypes() if row.in_numpy]


def pack(header: Any, data: bytes = b"") -> bytes:
    """Return a file with this header (JSON or raw bytes) and these data bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def refusal(path: Path, content: bytes) -> str:
    """Write a file that must be refused, and return the error's text."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@st.composite
def states(draw: st.DrawFn) -> dict[str, np.ndarray]:
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=5, unique=True)
    )
    state = {}
    for name in names:
        if name != "__metadata__":
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            state[name] = np.zeros(shape, draw(st.sampled_from(PLAIN)).numpy)
    return state


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states(), note=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
def test_entries_are_what_the_library_reads(
    tmp_path: Path, state: dict[str, np.ndarray], note: str | None
) -> None:
    path = tmp_path / "a.safetensors"
    save_file(state, path, None if note is None else {"note": note})
    header = read_header(path)
    assert header.file_bytes == path.stat().st_size
    assert dict(header.metadata) == ({} if note is None else {"note": note})
    assert set(header.tensors) == set(state)
    with safe_open(path, framework="numpy") as library:
        for name, found in header.tensors.items():
            view = library.get_slice(name)
            assert (dtypes.get(found.dtype).safetensors, list(found.shape)) == (
                view.get_dtype(),
                view.get_shape(),
            )
            assert found.size_bytes == state[name].nbytes
            assert found.size_elems == state[name].size
    starts = [found.start for found in header.tensors.values()]
    assert starts == sorted(starts)
    assert all(start >= header.data_start_bytes for start in starts)


@given(state=states(), note=st.none() | st.just({"format": "np"}))
def test_the_encoder_writes_the_bytes_that_the_library_writes(
    state: dict[str, np.ndarray], note: dict[str, str] | None
) -> None:
    head, entries = encode_header({n: (a.dtype.name, a.shape) for n, a in state.items()}, note)
    data = b"".join(state[e.name].tobytes() for e in entries)
    assert head + data == save(state, note)


def test_every_dtype_survives_encoding_and_reading_and_is_aligned(tmp_path: Path) -> None:
    rows = dtypes.all_dtypes()
    head, entries = encode_header({row.short: (row.name, (3, 1)) for row in rows}, {"b": "2", "a": "1"})
    (tmp_path / "a").write_bytes(head + bytes(sum(e.size_bytes for e in entries)))
    header = read_header(tmp_path / "a")
    assert list(header.tensors.values()) == entries
    assert list(header.metadata) == ["a", "b"]
    assert header.data_start_bytes == len(head)
    assert len(head) % 8 == 0
    for row in rows:
        assert header.tensors[row.short].dtype == row.name
        assert header.tensors[row.short].start % row.itemsize_bytes == 0


def test_what_the_format_allows_is_read(tmp_path: Path) -> None:
    zero = {
        "z0": entry("F32", (0, 3), (0, 0)),
        "a": entry(),
        "s": entry("I64", (), (8, 16)),
        "z1": entry("U8", (0,), (16, 16)),
    }
    text = json.dumps({"__metadata__": {}, **zero}).encode() + b"   "
    (tmp_path / "f").write_bytes(pack(text, bytes(16)))
    assert set(read_header(tmp_path / "f").tensors) == {"z0", "a", "s", "z1"}
    (tmp_path / "empty").write_bytes(pack({}))
    assert read_header(tmp_path / "empty").tensors == {}
    (tmp_path / "more").write_bytes(pack({"": entry(note=[1])}, bytes(8)))
    assert list(read_header(tmp_path / "more").tensors) == [""]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "seven bytes": (b"\0" * 7, "has 7 bytes"),
    "length behind the end": (struct.pack("<Q", 9) + b"{}", "only 2 follow"),
    "length far too large": (b"\xff" * 8 + b"{}", f"allows {MAX_HEADER_BYTES}"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not valid JSON: .*utf-8"),
    "same name twice": (pack(b'{"a":1,"a":1}'), "key 'a' stands twice"),
    "metadata holds a number": (pack({"__metadata__": {"a": 1}}), "'a': 1"),
    "half a surrogate pair": (pack(b'{"\\ud800": 1}'), "no Unicode"),
    "entry is a list": (pack({"w": ["F32", [2], [0, 8]]}, bytes(8)), "an entry is an object"),
    "no shape": (pack({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "lacks shape"),
    "negative extent": (pack({"w": entry(shape=[-2])}, bytes(8)), "a shape is a list"),
    "huge extent": (pack({"w": entry(shape=[10**30, 0])}, bytes(8)), "a shape is a list|fits 64 bits"),
    "shape beyond all memory": (pack({"w": entry(shape=[2**62, 2**62])}, bytes(8)), "larger than any array"),
    "65 dims": (pack({"w": entry("U8", [1] * 65, [0, 1])}, bytes(1)), "at most 64 dims"),
    "offsets out of order": (pack({"w": entry(offsets=[8, 0])}, bytes(8)), "takes 8 bytes, .* span -8"),
    "too few bytes": (pack({"w": entry(offsets=[0, 4])}, bytes(4)), "takes 8 bytes, .* span 4"),
    "truncated data": (pack({"w": entry()}, bytes(7)), "its data ends"),
    "trailing bytes": (pack({"w": entry()}, bytes(9)), "1 bytes follow"),
    "hole between": (pack({"v": entry(), "w": entry(offsets=[9, 17])}, bytes(17)), "no hole"),
    "overlap": (pack({"v": entry(), "w": entry(offsets=[7, 15])}, bytes(15)), "overlaps"),
    "empty one inside another": (pack({"v": entry(), "w": entry("U8", [0], [4, 4])}, bytes(8)), "overlaps"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a Git LFS pointer .*git lfs pull"),
    "a page": (b"\n<!DOCTYPE html><html>", "is a page of a web server"),
    "torch.save": (b"PK\3\4" + bytes(60), "is a zip, as torch.save writes .*save_file"),
    "GGUF": (b"GGUF\3" + bytes(60), "is a GGUF file"), "JSON": (b'{"weight_map": {}}', "is JSON"),
    "zeros": (bytes(64), "is empty, as a download"),
    "nested too deep": (pack(b'{"a":{"shape":[' + b"[" * 200_000), "nests too deep"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "text"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_with_its_reason(tmp_path: Path, content: bytes, text: str) -> None:
    found = refusal(tmp_path / "bad.safetensors", content)
    assert re.search(text, found), found


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, text in (
        ("gone", "no such file"), ("dangling", "no such file"), (".", "is a directory"),
        ("pipe", "is not a regular file"), ("a\0b", "is read from its path"), ("pipe/x", "cannot be opened"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=text):
            read_header(str(tmp_path / name))


def test_a_header_over_the_limit_is_refused_although_the_file_holds_it(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse
    with pytest.raises(CheckpointError, match=f"{MAX_HEADER_BYTES + 1} bytes, the format allows"):
        read_header(tmp_path / "big")


def test_an_unknown_name_is_answered_with_close_ones(tmp_path: Path) -> None:
    save_file({"layer.0.weight": np.zeros(2), "bias": np.zeros(2)}, tmp_path / "f")
    text = r"tensor 'layer.0.weihgt' is not in .* 2 tensors; did you mean layer.0.weight"
    with pytest.raises(CheckpointError, match=text):
        read_header(tmp_path / "f").entry("layer.0.weihgt")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(pack({}))
    (tmp_path / "bad").write_bytes(b"x")
    before = os.listdir("/proc/self/fd")
    read_header(tmp_path / "good")
    for name in ("bad", "."):
        with pytest.raises(CheckpointError):
            read_header(tmp_path / name)
        with pytest.raises(CheckpointError):
            CheckpointReader(tmp_path / name)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("tensors", "metadata", "text"),
    [
        ({"__metadata__": ("f32", (2,))}, None, "a name is Unicode text other than '__metadata__'"),
        ({"\ud800": ("f32", (2,))}, None, "a name is Unicode text"),
        ({3: ("f32", (2,))}, None, "tensor 3: a name is Unicode text"),
        ({"w": ("f32", (2**62, 2**62, 0))}, None, "larger than any array"),
        ({"w": ("f32", (2,))}, {"a": 1}, "__metadata__ maps text to text"),
        ({"w": ("f32", (2,))}, {"a": "x" * MAX_HEADER_BYTES}, f"at most {MAX_HEADER_BYTES} bytes"),
    ],
    ids=["reserved", "surrogate", "number", "huge", "metadata", "long"],
)
def test_the_encoder_refuses_what_no_header_can_say(tensors: Any, metadata: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        encode_header(tensors, metadata)


def damaged(rng: np.random.Generator, whole: bytes, head_bytes: int) -> bytes:
    """Return a file with a few bytes of its header changed, a piece cut off, or one put on."""
    kind = rng.integers(0, 10)
    if kind == 0:
        return whole[: rng.integers(0, len(whole))]
    if kind == 1:
        return whole + bytes(rng.integers(1, 20))
    if kind == 2:  # what no reader can see: another name, other metadata
        return whole.replace(*[(b'"a.w"', b'"a.v"'), (b'"format"', b'"Format"')][rng.integers(0, 2)])
    bad = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, head_bytes))
        bad[at] = (
            rng.choice(list(b'0123456789[]{}",:FIU '))
            if kind < 6
            else bad[at] ^ (1 << int(rng.integers(0, 8)))
        )
    return bytes(bad)


def test_a_damaged_file_is_refused_or_gives_the_same_data(
    tmp_path: Path, rng: np.random.Generator, full: bool
) -> None:
    state: dict[str, np.ndarray] = {
        "a.w": rng.standard_normal((4, 6), np.float32), "a.b": rng.standard_normal((6,), np.float32),
        "n": rng.integers(0, 99, (3, 2)), "s": np.array(3, np.float16), "z": np.zeros((0, 4), np.uint8),
        "f": rng.integers(0, 2, 10) > 0, "h": rng.standard_normal((3, 3)).astype(np.float16),
    }  # fmt: skip
    whole = save(state, {"format": "np"})
    (tmp_path / "whole").write_bytes(whole)
    original = read_header(tmp_path / "whole").tensors
    texts: list[str] = []
    path = tmp_path / "damaged"
    tries = 5000 if full else 300
    for _ in range(tries):
        content = damaged(rng, whole, 8 + int.from_bytes(whole[:8], "little"))
        path.write_bytes(content)
        try:
            with safe_open(path, framework="numpy"):
                library_reads = True
        except SafetensorError:
            library_reads = False
        try:
            with CheckpointReader(path) as reader:
                for name, found in reader.header.tensors.items():
                    value = reader.read_box(name)
                    assert value.tobytes() == content[found.start : found.stop]
                    same = original.get(name)
                    if same is not None and (same.dtype, same.shape) == (found.dtype, found.shape):
                        assert value.tobytes() == state[name].tobytes()
            assert library_reads, "lowshard read a file that the library refuses"
        except CheckpointError as error:
            texts.append(str(error))
    assert all(text.startswith(f"{path}: ") for text in texts)
    assert len(texts) > tries // 2
    assert tries - len(texts) > tries // 50  # names and metadata may change unseen: there is no checksum
