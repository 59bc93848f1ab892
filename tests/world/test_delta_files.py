"""Deltas as files: each changed bit and no other, applied to what they were made from, or refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support import mode
from support.checkpoints import Values, attention_and_more, on_ranks, same, save_over, values_of
from support.save_steps import Steps, counted, watched

from lowshard import dtypes
from lowshard.checkpoint import Catalog, Delta, open_deltas, read_header, write_delta
from lowshard.checkpoint.delta_codec import Checksum
from lowshard.checkpoint.hf_index import HF_INDEX
from lowshard.cli import main
from lowshard.comm.loopback import LoopbackTransport
from lowshard.errors import CheckpointError, LowshardError, NotDurable
from lowshard.reshard import digest, model_digest
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, load, plan_load
from lowshard.weights.checkpoint_convert import Settings

TILINGS = {n: t for n, t in attention_and_more(3).items() if n not in ("large", "wide")}
FORMS = ("xor", "overwrite", "sparse")


def stepped(values: Values, rng: np.random.Generator, share: float = 0.02) -> Values:
    """Return values of which some bits have flipped; every other tensor at least in one place."""
    made = {}
    for number, (name, value) in enumerate(values.items()):
        new = value.copy()
        raw = new.reshape(-1).view(np.uint8)
        count = int(rng.binomial(raw.size, share)) or number % 2
        if raw.size:
            np.bitwise_xor.at(
                raw, rng.integers(0, raw.size, count), rng.integers(1, 256, count, dtype=np.uint8)
            )
        made[name] = new
    return made


def whole(path: Path) -> Values:
    """Return a checkpoint's tensors."""
    catalog = Catalog.open(path)
    plan = plan_load(catalog, {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()})
    return load(catalog, plan)


def holds(path: Path, values: Values) -> bool:
    """Return whether a checkpoint is those values, to the bit."""
    found = whole(path)
    return found.keys() == values.keys() and all(same(found[n], v) for n, v in values.items())


def place(folder: Path, form: str, version: int) -> Path:
    """Return where a delta of a form goes."""
    folder.mkdir(exist_ok=True)
    return folder / (f"d{version}.safetensors" if form == "sparse" else f"weight_v{version:06d}")


def delta(base: Path, following: Path, folder: Path, form: str, version: int, **options: Any) -> Path:
    """Write a delta and return its path."""
    path = place(folder, form, version)
    if form != "sparse":
        options["encoding"] = form
    write_delta(base, following, path, version=version, base_version=version - 1, **options)
    return path


@pytest.fixture
def versions(tmp_path: Path, rng: np.random.Generator) -> list[Values]:
    """Four versions of a model, saved by three ranks as v0 to v3."""
    made = [values_of(TILINGS)]
    for _ in range(3):
        made.append(stepped(made[-1], rng))
    for number, values in enumerate(made):
        save_over(tmp_path / f"v{number}", values, TILINGS, 3)
    return made


def snapshot(path: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ---- what is written


def changed_by_hand(path: Path, form: str, before: Values) -> Values:
    """Return what a delta makes of values, read with safetensors' own library and Python alone."""
    made = {name: value.copy() for name, value in before.items()}
    files = [path] if form == "sparse" else sorted(path.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "np") as opened:
            for key in opened.keys():  # noqa: SIM118
                name = key.removesuffix(".indices").removesuffix(".values")
                raw = made[name].reshape(-1).view(np.uint8)
                if form == "sparse":
                    if key.endswith(".indices"):
                        entry = read_header(file).entry(f"{name}.values")
                        data = file.read_bytes()[entry.start : entry.stop]
                        unit = f"u{made[name].itemsize}"
                        made[name].reshape(-1).view(unit)[opened.get_tensor(key)] = np.frombuffer(data, unit)
                    continue
                packed = zlib.decompress(opened.get_tensor(name).tobytes())
                if form == "xor":
                    raw ^= np.frombuffer(packed, np.uint8)
                else:
                    count = int.from_bytes(packed[:4], "little")
                    at = np.frombuffer(packed, "<u4", count, 4)
                    raw[at] = np.frombuffer(packed, np.uint8, count, 4 + 4 * count)
                assert opened.metadata()[name] == f"{zlib.adler32(raw.tobytes()):08x}"
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_a_delta_says_what_changes_and_nothing_else(tmp_path: Path, form: str, share: float) -> None:
    rng = mode.rng(f"delta {form} {share}")
    before = values_of(TILINGS)
    before["gqa"].reshape(-1).view(np.uint32)[:4] = [
        0x7FC00001,
        0xFFC00002,
        0x80000000,
        0,
    ]  # NaN payloads, -0.0
    after = stepped(before, rng, share)
    after["gqa"].reshape(-1).view(np.uint32)[:4] = [0x7FC00003, 0xFFC00002, 0, 0x80000000]
    save_over(tmp_path / "a", before, TILINGS, 3)
    save_over(tmp_path / "b", after, TILINGS, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", form, 1)
    by_hand = changed_by_hand(path, form, before)
    assert all(same(by_hand[n], v) for n, v in after.items())
    changed = {n for n in before if not same(before[n], after[n])}
    opened = Delta.open(path)
    assert set(opened.tensors) == changed
    assert (opened.version, opened.base_version, opened.encoding) == (1, 0, form)
    want = digest({n: (Tiling.whole(v.shape, TILINGS[n].dtype), v) for n, v in after.items()})
    assert opened.digest == model_digest(want)
    for name in changed:
        apart = before[name].reshape(-1).view(f"u{before[name].itemsize}") != after[name].reshape(-1).view(
            f"u{before[name].itemsize}"
        )
        patch = opened.patch(name, TILINGS[name].dtype, before[name].shape)
        positions = np.arange(apart.size) if patch.positions is None else patch.positions
        if form != "overwrite":
            found = positions if patch.positions is not None else np.flatnonzero(patch.bits)
            assert np.array_equal(found, np.flatnonzero(apart))
    apply_deltas(tmp_path / "a", [path], tmp_path / "out")
    assert holds(tmp_path / "out", after)


def test_random_tensors_and_changes_come_out_bit_for_bit(tmp_path: Path) -> None:
    """Plain files of one tensor each: any dtype, shape and change, through every form."""
    for case in range(mode.sample(range(400), 24, "delta cases")[-1] + 1 if mode.full() else 24):
        rng = mode.rng(f"delta case {case}")
        dtype = str(
            rng.choice(
                ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8", "bool", "float64"]
            )
        )
        shape = tuple(int(n) for n in rng.integers(0, 9, int(rng.integers(0, 5))))
        row = dtypes.get(dtype)
        size = int(np.prod(shape, dtype=int))
        high = 2 if dtype == "bool" else 256
        raw = rng.integers(0, high, size * row.itemsize_bytes, dtype=np.uint8)
        other = raw.copy()
        flips = rng.random(raw.size) < rng.choice([0.0, 0.05, 0.9])
        other[flips] ^= 1
        tiling = {"t": Tiling.whole(shape, dtype)}
        folder = tmp_path / str(case)
        folder.mkdir()
        made = [{"t": r.view(row.numpy).reshape(shape)} for r in (raw, other)]
        for name, values in zip("ab", made, strict=True):
            save_over(folder / name, values, tiling, 1)
        form = FORMS[case % 3]
        path = delta(folder / "a", folder / "b", folder / "d", form, 1)
        assert all(same(changed_by_hand(path, form, made[0])[n], v) for n, v in made[1].items())
        apply_deltas(folder / "a", [path], folder / "out")
        assert holds(folder / "out", made[1]), (case, dtype, shape, form)


# ---- chains


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_applied_as_one(tmp_path: Path, versions: list[Values], form: str) -> None:
    folder = tmp_path / "deltas"
    for number in (1, 2, 3):
        delta(tmp_path / f"v{number - 1}", tmp_path / f"v{number}", folder, form, number)
    report = apply_deltas(tmp_path / "v0", [folder], tmp_path / "out")
    assert (report.applied, report.version) == (3, 3)
    assert holds(tmp_path / "out", versions[3])
    assert report.digest == model_digest(Catalog.open(tmp_path / "v3").digests or {})
    before, after = Catalog.open(tmp_path / "v0"), Catalog.open(tmp_path / "out")
    assert before.num_ranks == after.num_ranks
    assert all(before.tensors[n].tiling == after.tensors[n].tiling for n in before.tensors)
    # what the base has already is left out, and its own place may be taken
    apply_deltas(tmp_path / "v1", [folder], tmp_path / "v1")
    assert holds(tmp_path / "v1", versions[3])
    with pytest.raises(CheckpointError, match="is the newest version of the chain already"):
        apply_deltas(tmp_path / "v1", [folder], tmp_path / "v1")


def test_forms_may_be_mixed_and_the_result_cut_anew(tmp_path: Path, versions: list[Values]) -> None:
    for number, form in enumerate(FORMS, 1):
        delta(tmp_path / f"v{number - 1}", tmp_path / f"v{number}", tmp_path / "deltas", form, number)
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: replicate}]")
    given = ["--to", "tp=2", "--strategies", tmp_path / "s.yaml", "-n", "1"]
    words = ["reshard", tmp_path / "v0", "--apply", tmp_path / "deltas", "-o", tmp_path / "cut", *given]
    assert main(list(map(str, words))) == 0
    assert holds(tmp_path / "cut", versions[3])
    assert Catalog.open(tmp_path / "cut").num_ranks == 2


@pytest.mark.parametrize("form", FORMS)
def test_plain_checkpoints_are_bases_too(tmp_path: Path, versions: list[Values], form: str) -> None:
    """One file, and a Hugging Face folder: what they hold is compared by digest, which they do not record."""
    for number in (0, 1):
        for to in (f"m{number}.safetensors", f"hf{number}"):
            words = ["reshard", tmp_path / f"v{number}", tmp_path / to, "--merged", "--file-size", "3KB"]
            assert main(list(map(str, words))) == 0
    (tmp_path / "hf0" / "lowshard.index.json").unlink()
    path = delta(tmp_path / "m0.safetensors", tmp_path / "hf1", tmp_path / "d", form, 1)
    assert Delta.open(path).base_digest == model_digest(Catalog.open(tmp_path / "v0").digests or {})
    apply_deltas(tmp_path / "hf0", [path], tmp_path / "hf")
    assert holds(tmp_path / "hf", versions[1])
    apply_deltas(tmp_path / "m0.safetensors", [path], tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "m1.safetensors").read_bytes()
    assert main(["reshard", str(tmp_path / "v3"), str(tmp_path / "m3.safetensors"), "--merged"]) == 0
    with pytest.raises(CheckpointError, match="no delta stands on that"):
        apply_deltas(tmp_path / "m3.safetensors", [path], tmp_path / "no.safetensors")
    apply_deltas(tmp_path / "m0.safetensors", [path], tmp_path / "m0.safetensors")
    assert (tmp_path / "m0.safetensors").read_bytes() == (tmp_path / "m1.safetensors").read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_several_ranks_share_the_work(tmp_path: Path, versions: list[Values], form: str) -> None:
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", form, 1)
    reports = on_ranks(3, lambda comm: apply_deltas(tmp_path / "v0", [path], tmp_path / "out", comm))
    assert len({r.digest for r in reports}) == 1
    assert holds(tmp_path / "out", versions[1])


def test_a_folder_of_whole_tensors_stays_one(tmp_path: Path, versions: list[Values]) -> None:
    """What `lowshard reshard --merged` wrote: several files with an index of Hugging Face's, in its own place."""
    words = ["reshard", tmp_path / "v0", tmp_path / "hf", "--merged", "--file-size", "3KB"]
    assert main(list(map(str, words))) == 0
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", "xor", 1)
    words = ["reshard", tmp_path / "hf", "--apply", path, "-o", tmp_path / "hf", "--file-size", "3KB"]
    assert main(list(map(str, words))) == 0
    assert holds(tmp_path / "hf", versions[1])
    named = set(json.loads((tmp_path / "hf" / HF_INDEX).read_text())["weight_map"].values())
    assert named == {p.name for p in (tmp_path / "hf").glob("*.safetensors")}
    assert len(named) > 2


def test_ranks_are_told_which_deltas() -> None:
    settings = Settings("a", "b", None, "", deltas=("c", "d"))
    assert Settings.from_json(settings.to_json()) == settings


def test_mxfp8_checkpoints_are_bytes_too(tmp_path: Path) -> None:
    rng = mode.rng("delta mxfp8")
    weights = {
        f"layers.{i}.mlp.up_proj.weight": rng.standard_normal((64, 96)).astype(np.float32) for i in range(2)
    }
    after = {n: w + (rng.random(w.shape) < 0.01) for n, w in weights.items()}
    for name, values in (("a", weights), ("b", after)):
        (tmp_path / name).mkdir()
        save_file({n: v.astype(np.float32) for n, v in values.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
        words = ["reshard", tmp_path / name, tmp_path / f"{name}8", "--mxfp8", "--to", "tp=2"]
        assert main([*map(str, words), "--strategies", str(tmp_path / "s.yaml")]) == 0
    for form in FORMS:
        path = delta(tmp_path / "a8", tmp_path / "b8", tmp_path / f"d{form}", form, 1)
        apply_deltas(tmp_path / "a8", [path], tmp_path / f"out{form}")
        assert holds(tmp_path / f"out{form}", whole(tmp_path / "b8"))


# ---- deltas of other writers


def foreign_folder(path: Path, before: Values, after: Values, version: int, **said: str) -> None:
    """Write a delta folder as another project does: no digests, one safetensors file, Adler-32."""
    path.mkdir(parents=True)
    data, sums = {}, {}
    for name, value in after.items():
        old, new = (v.reshape(-1).view(np.uint8) for v in (before[name], value))
        data[name] = np.frombuffer(zlib.compress((old ^ new).tobytes()), np.uint8)
        sums[name] = f"{zlib.adler32(new.tobytes()):08x}"
    save_file(data, path / "model-00001-of-00001.safetensors", sums)
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": "xor",
        "compression_format": "zlib", "checksum_format": "adler32", "engine": "theirs", **said,
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": dict.fromkeys(data, "model-00001-of-00001.safetensors")}
    (path / HF_INDEX).write_text(json.dumps(index))


def foreign_sparse(path: Path, before: Values, after: Values, version: int) -> None:
    """Write a sparse file as TRL does: int32 indices and values of changed elements."""
    data: dict[str, np.ndarray] = {}
    for name, value in after.items():
        unit = f"u{value.itemsize}"
        at = np.flatnonzero(before[name].reshape(-1).view(unit) != value.reshape(-1).view(unit))
        if len(at):
            data[f"{name}.indices"] = at.astype(np.int32)
            data[f"{name}.values"] = value.reshape(-1)[at]
    said = {"sparse": "True", "model_version": str(version), "changed_params": str(len(data) // 2)}
    save_file(data, path, said)


def plain_dtypes(values: Values) -> Values:
    """Return those that safetensors' NumPy interface can write."""
    return {n: v for n, v in values.items() if v.dtype.kind in "fiu" and "float8" not in str(v.dtype)}


def test_deltas_of_other_writers_are_read(tmp_path: Path, versions: list[Values]) -> None:
    made = [plain_dtypes(v) for v in versions]
    tilings = {n: TILINGS[n] for n in made[0]}
    save_over(tmp_path / "base", made[0], tilings, 3)
    for number in (1, 2, 3):
        foreign_folder(tmp_path / "f" / f"weight_v{number:06d}", made[number - 1], made[number], number)
        (tmp_path / "s").mkdir(exist_ok=True)
        foreign_sparse(tmp_path / "s" / f"{number}.safetensors", made[number - 1], made[number], number)
    for form in "fs":
        report = apply_deltas(tmp_path / "base", [tmp_path / form], tmp_path / f"out{form}")
        assert report.version == 3
        assert holds(tmp_path / f"out{form}", made[3])
    shutil.rmtree(tmp_path / "f" / "weight_v000002")
    with pytest.raises(
        CheckpointError, match=r"a link of the chain is missing: .*weight_v000003 .*stands on version 2"
    ):
        apply_deltas(tmp_path / "base", [tmp_path / "f"], tmp_path / "no")
    # without digests the base shows in the checksum of what comes out
    save_over(tmp_path / "other", made[1], tilings, 3)
    with pytest.raises(CheckpointError, match=r"adler32 of the new tensor .* or was made from another base"):
        apply_deltas(tmp_path / "other", [tmp_path / "f" / "weight_v000001"], tmp_path / "no")
    assert not (tmp_path / "no").exists()
    foreign_folder(tmp_path / "z", made[0], made[1], 1, compression_format="lzma")
    with pytest.raises(CheckpointError, match="compression_format is one of zlib, zstd, none, got 'lzma'"):
        open_deltas([tmp_path / "z"])


def test_zstd_is_written_and_read_where_its_package_is(tmp_path: Path, versions: list[Values]) -> None:
    zstandard = pytest.importorskip("zstandard", reason="needs zstandard: pip install 'lowshard[deltas]'")
    path = place(tmp_path / "d", "xor", 1)
    write_delta(tmp_path / "v0", tmp_path / "v1", path, compression="zstd")
    file = next(path.glob("*.safetensors"))
    with safe_open(file, "np") as opened:
        for name in opened.keys():  # noqa: SIM118
            packed = zstandard.ZstdDecompressor().stream_reader(opened.get_tensor(name).tobytes()).read()
            raw = versions[0][name].reshape(-1).view(np.uint8) ^ np.frombuffer(packed, np.uint8)
            assert raw.tobytes() == versions[1][name].tobytes()
    apply_deltas(tmp_path / "v0", [path], tmp_path / "out")
    assert holds(tmp_path / "out", versions[1])


@pytest.mark.parametrize("name", ["adler32", "crc32"])
def test_checksums_are_those_of_the_library(name: str) -> None:
    made = Checksum(name)
    for piece in (b"ab", b"", b"cdef"):
        made.update(piece)
    assert made.hexdigest() == f"{getattr(zlib, name)(b'abcdef'):08x}"


@pytest.mark.parametrize(
    ("package", "name", "routine"), [("xxhash", "xxh3-128", "xxh3_128"), ("blake3", "blake3", "blake3")]
)
def test_checksums_of_other_packages_are_theirs(package: str, name: str, routine: str) -> None:
    library = pytest.importorskip(package, reason=f"needs {package}: pip install 'lowshard[deltas]'")
    made = Checksum(name)
    for piece in (b"ab", b"", b"cdef"):
        made.update(piece)
    assert made.hexdigest() == getattr(library, routine)(b"abcdef").hexdigest()


# ---- what is refused


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> None:
    """Change the tensors and the metadata of a sparse file of float32, int64 and int32."""
    header = read_header(path)
    data: dict[str, np.ndarray] = {}
    raw = path.read_bytes()
    for name, entry in header.tensors.items():
        data[name] = np.frombuffer(raw[entry.start : entry.stop], dtypes.get(entry.dtype).numpy).copy()
    said = dict(header.metadata)
    change(data, said)
    save_file(data, path, said)


def _index(n: str, value: int) -> Callable[[dict[str, np.ndarray], dict[str, str]], None]:
    def change(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
        data["rows.indices"][int(n)] = value

    return change


def _twice(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["rows.indices"][1] = data["rows.indices"][0]


def _dtype(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["rows.values"] = data["rows.values"].astype(np.float64)


def _wide(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["rows.indices"] = data["rows.indices"].astype(np.int64)


def _short(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["rows.values"] = data["rows.values"][:-1]


def _more(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    for end in (".indices", ".values"):
        data["rows" + end] = np.zeros(13 * 6 + 1, data["rows" + end].dtype)


def _alone(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    del data["rows.values"]


def _strange(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["nobody.indices"], data["nobody.values"] = np.zeros(1, np.int32), np.zeros(1, np.float32)
    said.pop("lowshard")


def _value(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    data["rows.values"].view(np.uint32)[0] ^= 1


def _version(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    said["model_version"] = "-1"


def _gone(data: dict[str, np.ndarray], said: dict[str, str]) -> None:
    for end in (".indices", ".values"):
        del data["few" + end]


SPOILT: list[tuple[str, Callable[..., None], str]] = [
    ("an index beyond", _index("-1", 13 * 6), "rows': positions lie from 0 to 77, got 78"),
    ("an index below", _index("0", -1), "rows': positions lie from 0 to 77, got -1"),
    ("an index twice", _twice, "rows': a position stands once"),
    ("another dtype", _dtype, "rows': the delta has values of float64, the base has float32"),
    ("wide indices", _wide, "rows': indices are int32 of one dim"),
    ("fewer values", _short, "rows': indices are int32 of one dim, and there are as many values"),
    ("more than there are", _more, "rows': the delta changes 79 elements, the base has 78"),
    ("indices alone", _alone, "rows.values' is not in the file"),
    ("another model's tensor", _strange, "nobody': the delta changes it, and .* has none of that name"),
    ("a flipped bit", _value, "rows': the delta makes a content of the digest .* the delta is damaged"),
    ("a negative version", _version, "model_version is a number of 0 or more, got '-1'"),
    ("a tensor that is gone", _gone, "few': the metadata has an entry for it, the file has no changes of it"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in SPOILT], ids=[case[0] for case in SPOILT])
def test_a_spoilt_sparse_file_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "few", "norm", "step")}
    before = values_of(tilings)
    after = {n: v.copy() for n, v in before.items()}
    for value in after.values():
        value.reshape(-1).view(np.uint8)[:: max(1, value.nbytes // 4)] ^= 1
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", "sparse", 1)
    rewritten(path, change)
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):
        apply_deltas(tmp_path / "a", [path], tmp_path / "out")
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):  # the same on every rank
        on_ranks(2, lambda comm: apply_deltas(tmp_path / "a", [path], tmp_path / "a", comm))


def test_the_wrong_base_and_missing_links_are_refused_by_name(tmp_path: Path, versions: list[Values]) -> None:
    one, two, three = (
        delta(tmp_path / f"v{n - 1}", tmp_path / f"v{n}", tmp_path / "d", "xor", n) for n in (1, 2, 3)
    )
    fork = delta(tmp_path / "v0", tmp_path / "v2", tmp_path / "fork", "xor", 2)
    cases: list[tuple[Path, list[Path], str]] = [
        (tmp_path / "v0", [two], r"holds \w{32}, and no delta stands on that: .*weight_v000002 stands on"),
        (
            tmp_path / "v0",
            [one, three],
            r"a link of the chain is missing: .*weight_v000003 \(version 3\) stands on",
        ),
        (tmp_path / "v2", [one, two], "is the newest version of the chain already"),
        (tmp_path / "v0", [one, fork], "stand on the same version"),
        (tmp_path / "v0", [tmp_path / "nothing"], "there is no such file"),
        (tmp_path / "v0", [tmp_path / "v1"], "deltas are folders weight_v... .*there is none"),
        (tmp_path / "v0", [], "deltas are a sequence of paths, at least one, got none"),
    ]
    for base, deltas, said in cases:
        with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):
            apply_deltas(base, deltas, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is a delta, which says .* `lowshard reshard BASE --apply"):
        Catalog.open(one)
    sparse = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d2", "sparse", 1)
    with pytest.raises(CheckpointError, match="is a delta, which says"):
        Catalog.open(sparse)


def test_a_base_whose_data_is_damaged_is_refused(tmp_path: Path, versions: list[Values]) -> None:
    """The index still has the right digest: the data has not."""
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", "xor", 1)
    part = Catalog.open(tmp_path / "v0").tensors["gate_up"].parts[0]
    raw = bytearray(Path(part.file).read_bytes())
    raw[part.entry.start] ^= 1
    Path(part.file).write_bytes(raw)
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match="gate_up': its data is damaged"):
        apply_deltas(tmp_path / "v0", [path], tmp_path / "out")
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match="gate_up': its data is damaged"):
        write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "again")


def test_what_is_no_delta_between_two_is_refused(tmp_path: Path, versions: list[Values]) -> None:
    fewer = {n: t for n, t in TILINGS.items() if n != "norm"}
    save_over(tmp_path / "fewer", {n: versions[1][n] for n in fewer}, fewer, 3)
    other = TILINGS | {"norm": Tiling.whole((601,), "float32", 3)}
    save_over(tmp_path / "other", versions[1] | {"norm": np.zeros(601, np.float32)}, other, 3)
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", "xor", 1)
    with nothing_changes(tmp_path):
        with pytest.raises(CheckpointError, match=r"tensor 'norm' of .*v0 is not in .*fewer"):
            write_delta(tmp_path / "v0", tmp_path / "fewer", tmp_path / "no")
        with pytest.raises(
            CheckpointError, match=r"tensor 'norm' is float32\[600\] in .*v0, float32\[601\] in"
        ):
            write_delta(tmp_path / "v0", tmp_path / "other", tmp_path / "no")
        with pytest.raises(CheckpointError, match="is there already; a delta is never replaced"):
            write_delta(tmp_path / "v0", tmp_path / "v1", path)
        with pytest.raises(CheckpointError, match="is there already; a delta is never replaced"):
            write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "v2")
        with pytest.raises(CheckpointError, match="its name says version 7, and version 8 was asked for"):
            write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "weight_v000007", version=8)
        with pytest.raises(
            CheckpointError, match=r"norm': the delta changes float32\[600\], the base has .* models"
        ):
            apply_deltas(tmp_path / "other", [path], tmp_path / "no")
        with pytest.raises(
            CheckpointError, match="one was quantised or converted: apply deltas to what they"
        ):
            Delta.open(path).check_tensor("norm", "float8_e4m3fn", (600,))
        with pytest.raises(CheckpointError, match="its name says version 7, and version 8 was asked for"):
            write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "weight_v000007.safetensors", version=8)
    report = write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "weight_v000007.safetensors")
    assert (report.version, report.base_version) == (7, 6)
    assert Delta.open(tmp_path / "weight_v000007.safetensors").version == 7


@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_are_refused_or_right(tmp_path: Path, form: str) -> None:
    """Any byte of a delta's files changed, or its end cut off: a LowshardError and nothing written, or all is right."""
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "columns", "few", "step")}
    before = values_of(tilings)
    after = stepped(before, mode.rng("damaged"), 0.05)
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", form, 1)
    files = [path] if form == "sparse" else sorted(path.iterdir())
    sound = {file: file.read_bytes() for file in files}
    right = 0
    cases = 600 if mode.full() else 40
    for case in range(cases):
        rng = random.Random(f"{mode.seed()} {form} {case}")
        file = rng.choice(files)
        raw = bytearray(sound[file])
        if rng.random() < 0.2:
            raw = raw[: rng.randrange(len(raw))]
        else:
            for _ in range(rng.choice([1, 1, 3])):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        file.write_bytes(raw)
        held = hashlib.sha256(repr(sorted(snapshot(tmp_path / "a").items())).encode()).digest()
        try:
            apply_deltas(tmp_path / "a", [path], tmp_path / "out")
        except LowshardError:
            assert not (tmp_path / "out").exists()
        else:
            assert holds(tmp_path / "out", after), f"case {case}"
            shutil.rmtree(tmp_path / "out")
            right += 1
        assert hashlib.sha256(repr(sorted(snapshot(tmp_path / "a").items())).encode()).digest() == held
        file.write_bytes(sound[file])
    assert right < cases / 2


# ---- a writer that fails


@pytest.mark.parametrize("form", ["xor", "sparse"])
def test_a_delta_that_fails_at_any_step_is_whole_or_not_there(tmp_path: Path, form: str) -> None:
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "few")}
    before = values_of(tilings)
    after = stepped(before, mode.rng("steps"), 0.1)
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    top = tmp_path / "d"

    def attempt(steps: Steps) -> BaseException | None:
        try:
            with watched(top, LoopbackTransport), counted(steps):
                write_delta(tmp_path / "a", tmp_path / "b", place(top, form, 1))
        except (LowshardError, OSError, KeyboardInterrupt) as error:
            return error
        return None

    counting = Steps()
    assert attempt(counting) is None
    faults = [(at, fault) for at, fault in counting.faults if not fault.startswith("PeerFailed")]
    assert len(faults) > 40
    committed = 0
    for at, fault in mode.sample(faults, 30, f"delta steps {form}"):
        shutil.rmtree(top)
        error = attempt(Steps(at, fault))
        path = top / place(top, form, 1).name
        there = (path if form == "sparse" else path / HF_INDEX).exists()
        committed += there
        if there:
            apply_deltas(tmp_path / "a", [path], tmp_path / "out")
            assert holds(tmp_path / "out", after)
        else:
            assert error is not None, (at, fault)
            assert not isinstance(error, NotDurable)
            write_delta(tmp_path / "a", tmp_path / "b", path)
        names = {p.name for p in (path.parent if form == "sparse" else path).iterdir()}
        if (
            "unlink" not in counting.names[at - 1]
        ):  # what a failed removal has left goes with the next save there
            assert len(names) == (1 if form == "sparse" else 2), (at, fault, names)
    assert committed
