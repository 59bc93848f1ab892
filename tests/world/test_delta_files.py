"""Deltas as files: each changed bit and no other, applied to what they were made from, or refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
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
from lowshard.checkpoint import Catalog, Delta, read_header, write_delta
from lowshard.checkpoint.checkpoint_index import HF_INDEX
from lowshard.checkpoint.delta_file import check_deltas
from lowshard.cli import main
from lowshard.comm.loopback import LoopbackTransport
from lowshard.errors import CheckpointError, LowshardError, NotDurable
from lowshard.reshard import digest, model_digest
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, load, plan_load
from lowshard.weights.convert_plan import Settings

TILINGS = {n: t for n, t in attention_and_more(3).items() if n not in ("large", "wide")}


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


def delta(base: Path, following: Path, folder: Path, version: int) -> Path:
    """Write a delta and return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"weight_v{version:06d}.safetensors"
    write_delta(base, following, path)
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


def changed_by_hand(path: Path, before: Values) -> Values:
    """Return what a delta makes of values, read with safetensors' own library and NumPy alone."""
    made = {name: value.copy() for name, value in before.items()}
    with safe_open(path, "np") as opened:
        for key in opened.keys():  # noqa: SIM118
            name = key.removesuffix(".indices")
            if name != key:
                entry = read_header(path).entry(f"{name}.values")
                data = path.read_bytes()[entry.start : entry.stop]
                unit = f"u{made[name].itemsize}"
                made[name].reshape(-1).view(unit)[opened.get_tensor(key)] = np.frombuffer(data, unit)
    return made


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_a_delta_says_what_changes_and_nothing_else(tmp_path: Path, share: float) -> None:
    rng = mode.rng(f"delta {share}")
    before = values_of(TILINGS)
    nans = [0x7FC00001, 0xFFC00002, 0x80000000, 0]  # NaN payloads, -0.0
    before["gqa"].reshape(-1).view(np.uint32)[:4] = nans
    after = stepped(before, rng, share)
    after["gqa"].reshape(-1).view(np.uint32)[:4] = [0x7FC00003, 0xFFC00002, 0, 0x80000000]
    save_over(tmp_path / "a", before, TILINGS, 3)
    save_over(tmp_path / "b", after, TILINGS, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", 1)
    by_hand = changed_by_hand(path, before)
    assert all(same(by_hand[n], v) for n, v in after.items())
    changed = {n for n in before if not same(before[n], after[n])}
    opened = Delta.open(path)
    assert set(opened.tensors) == changed
    assert (opened.version, opened.base_version) == (1, 0)
    want = digest({n: (Tiling.whole(v.shape, TILINGS[n].dtype), v) for n, v in after.items()})
    assert opened.digest == model_digest(want)
    for name in changed:
        unit = f"u{before[name].itemsize}"
        apart = before[name].reshape(-1).view(unit) != after[name].reshape(-1).view(unit)
        patch = opened.patch(name)
        assert np.array_equal(patch.positions, np.flatnonzero(apart))
    apply_deltas(tmp_path / "a", [path], tmp_path / "out")
    assert holds(tmp_path / "out", after)


def test_random_tensors_and_changes_come_out_bit_for_bit(tmp_path: Path) -> None:
    """Plain files of one tensor each: any dtype, shape and change."""
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
        path = delta(folder / "a", folder / "b", folder / "d", 1)
        assert all(same(changed_by_hand(path, made[0])[n], v) for n, v in made[1].items())
        apply_deltas(folder / "a", [path], folder / "out")
        assert holds(folder / "out", made[1]), (case, dtype, shape)


# ---- chains


def test_a_chain_is_applied_as_one(tmp_path: Path, versions: list[Values]) -> None:
    folder = tmp_path / "deltas"
    for number in (1, 2, 3):
        delta(tmp_path / f"v{number - 1}", tmp_path / f"v{number}", folder, number)
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
    assert (
        apply_deltas(tmp_path / "v1", [folder], tmp_path / "v1").applied == 0
    )  # nor is a second time an error
    assert holds(tmp_path / "v1", versions[3])


def test_the_result_may_be_cut_anew(tmp_path: Path, versions: list[Values]) -> None:
    for number in (1, 2, 3):
        delta(tmp_path / f"v{number - 1}", tmp_path / f"v{number}", tmp_path / "deltas", number)
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: replicate}]")
    given = ["--to", "tp=2", "--strategies", tmp_path / "s.yaml", "-n", "1"]
    words = ["reshard", tmp_path / "v0", "--apply", tmp_path / "deltas", "-o", tmp_path / "cut", *given]
    assert main(list(map(str, words))) == 0
    assert holds(tmp_path / "cut", versions[3])
    assert Catalog.open(tmp_path / "cut").num_ranks == 2


def test_plain_checkpoints_are_bases_too(tmp_path: Path, versions: list[Values]) -> None:
    """One file, and a Hugging Face folder: what they hold is compared by digest, which they do not record."""
    for number in (0, 1):
        for to in (f"m{number}.safetensors", f"hf{number}"):
            words = ["reshard", tmp_path / f"v{number}", tmp_path / to, "--merged", "--file-size", "3KB"]
            assert main(list(map(str, words))) == 0
    (tmp_path / "hf0" / "lowshard.index.json").unlink()
    path = delta(tmp_path / "m0.safetensors", tmp_path / "hf1", tmp_path / "d", 1)
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


def test_several_ranks_share_the_work(tmp_path: Path, versions: list[Values]) -> None:
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", 1)
    reports = on_ranks(3, lambda comm: apply_deltas(tmp_path / "v0", [path], tmp_path / "out", comm))
    assert len({r.digest for r in reports}) == 1
    assert holds(tmp_path / "out", versions[1])


def test_a_folder_of_whole_tensors_stays_one(tmp_path: Path, versions: list[Values]) -> None:
    """What `lowshard reshard --merged` wrote: several files with an index of Hugging Face's, in its own place."""
    words = ["reshard", tmp_path / "v0", tmp_path / "hf", "--merged", "--file-size", "3KB"]
    assert main(list(map(str, words))) == 0
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", 1)
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
    path = delta(tmp_path / "a8", tmp_path / "b8", tmp_path / "d", 1)
    apply_deltas(tmp_path / "a8", [path], tmp_path / "out")
    assert holds(tmp_path / "out", whole(tmp_path / "b8"))


# ---- what is refused


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    assert snapshot(folder) == before


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, str]], object]) -> None:
    """Change the tensors and the metadata of a delta of float32, int64 and int32."""
    header = read_header(path)
    data: dict[str, np.ndarray] = {}
    raw = path.read_bytes()
    for name, entry in header.tensors.items():
        data[name] = np.frombuffer(raw[entry.start : entry.stop], dtypes.get(entry.dtype).numpy).copy()
    said = dict(header.metadata)
    change(data, said)
    save_file(data, path, said)


AT, TO = "rows.indices", "rows.values"
SPOILT: dict[str, tuple[Callable[[dict[str, Any], dict[str, str]], object], str]] = {
    "an index beyond": (lambda d, _: d[AT].put(-1, 78), "rows': positions lie from 0 to 77, got 78"),
    "an index below": (lambda d, _: d[AT].put(0, -1), "rows': positions lie from 0 to 77, got -1"),
    "an index twice": (lambda d, _: d[AT].put(1, d[AT][0]), "rows': a position stands once"),
    "another dtype": (
        lambda d, _: d.update({TO: d[TO].astype(np.float64)}),
        "as many values of float32, got .* float64",
    ),
    "narrow indices": (
        lambda d, _: d.update({AT: d[AT].astype(np.int16)}),
        "rows': indices are int32 or int64 of one dim",
    ),
    "fewer values": (
        lambda d, _: d.update({TO: d[TO][:-1]}),
        "rows': indices .*, and there are as many values",
    ),
    "more than there are": (
        lambda d, _: d.update({key: np.zeros(79, d[key].dtype) for key in (AT, TO)}),
        "rows': a position stands once, 0 stands twice",
    ),
    "indices alone": (lambda d, _: d.pop(TO), "rows': .* the file lacks rows.indices or rows.values"),
    "a tensor by itself": (
        lambda d, _: d.update({"no.indices": np.zeros(1, np.int32)}),
        r"no\.indices' by itself",
    ),
    "another program's": (
        lambda _, m: m.pop("lowshard"),
        "is no delta of lowshard: .* model_version and lowshard",
    ),
    "a flipped bit": (
        lambda d, _: d[TO].put(0, -d[TO][0]),
        "rows': the delta makes a content .* the delta is damaged",
    ),
    "a negative version": (
        lambda _, m: m.update(model_version="-1"),
        "model_version is a number of 0 or more, got",
    ),
    "a tensor that is gone": (
        lambda d, _: (d.pop("few.indices"), d.pop("few.values")),
        "few': the metadata has an entry for it, the file lacks few.indices",
    ),
}


@pytest.mark.parametrize(("change", "said"), SPOILT.values(), ids=SPOILT)
def test_a_spoilt_sparse_file_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "few", "norm", "step")}
    before = values_of(tilings)
    after = {n: v.copy() for n, v in before.items()}
    for value in after.values():
        value.reshape(-1).view(np.uint8)[:: max(1, value.nbytes // 4)] ^= 1
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", 1)
    rewritten(path, change)
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):
        apply_deltas(tmp_path / "a", [path], tmp_path / "out")
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):  # the same on every rank
        on_ranks(2, lambda comm: apply_deltas(tmp_path / "a", [path], tmp_path / "a", comm))


def test_the_wrong_base_and_missing_links_are_refused_by_name(tmp_path: Path, versions: list[Values]) -> None:
    one, two, three = (
        delta(tmp_path / f"v{n - 1}", tmp_path / f"v{n}", tmp_path / "d", n) for n in (1, 2, 3)
    )
    fork = delta(tmp_path / "v0", tmp_path / "v2", tmp_path / "fork", 2)
    cases: list[tuple[Path, list[Path], str]] = [
        (
            tmp_path / "v0",
            [two],
            r"holds \w{32}, and no delta stands on that: .*weight_v000002.safetensors stands on",
        ),
        (
            tmp_path / "v0",
            [one, three],
            r"a link of the chain is missing, .*weight_v000003.safetensors \(version 3\) stands on",
        ),
        (tmp_path / "v0", [one, fork], "stand on the same version"),
        (tmp_path / "v0", [tmp_path / "nothing"], "there is no such file"),
        (tmp_path / "v0", [tmp_path / "v1"], "deltas are safetensors files .*there is none"),
        (tmp_path / "v0", [], "deltas are a sequence of paths, at least one, got none"),
    ]
    for base, deltas, said in cases:
        with nothing_changes(tmp_path), pytest.raises(CheckpointError, match=said):
            apply_deltas(base, deltas, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is a delta, which says .* `lowshard reshard BASE --apply"):
        Catalog.open(one)


def test_a_base_whose_data_is_damaged_is_refused(tmp_path: Path, versions: list[Values]) -> None:
    """The index still has the right digest: the data has not."""
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", 1)
    part = Catalog.open(tmp_path / "v0").tensors["gate_up"].parts[0]
    raw = bytearray(Path(part.file).read_bytes())
    raw[part.entry.start] ^= 1
    Path(part.file).write_bytes(raw)
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match="gate_up': its data is damaged"):
        apply_deltas(tmp_path / "v0", [path], tmp_path / "out")
    with nothing_changes(tmp_path), pytest.raises(CheckpointError, match="gate_up': its data is damaged"):
        write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "again.safetensors")


def test_what_is_no_delta_between_two_is_refused(tmp_path: Path, versions: list[Values]) -> None:
    fewer = {n: t for n, t in TILINGS.items() if n != "norm"}
    save_over(tmp_path / "fewer", {n: versions[1][n] for n in fewer}, fewer, 3)
    other = TILINGS | {"norm": Tiling.whole((601,), "float32", 3)}
    save_over(tmp_path / "other", versions[1] | {"norm": np.zeros(601, np.float32)}, other, 3)
    path = delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d", 1)
    with nothing_changes(tmp_path):
        with pytest.raises(CheckpointError, match=r"tensor 'norm' of .*v0 is not in .*fewer"):
            write_delta(tmp_path / "v0", tmp_path / "fewer", tmp_path / "no.safetensors")
        with pytest.raises(
            CheckpointError, match=r"tensor 'norm' is float32\[600\] in .*v0, float32\[601\] in"
        ):
            write_delta(tmp_path / "v0", tmp_path / "other", tmp_path / "no.safetensors")
        with pytest.raises(CheckpointError, match="is there already; a delta is never replaced"):
            write_delta(tmp_path / "v0", tmp_path / "v1", path)
        with pytest.raises(CheckpointError, match="a delta is a file whose name ends in"):
            write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d2")
        with pytest.raises(
            CheckpointError, match=r"norm': the delta changes float32\[600\], the base has .* models"
        ):
            apply_deltas(tmp_path / "other", [path], tmp_path / "no")
        converted = versions[0] | {"norm": np.zeros(600)}
        save_over(tmp_path / "v9", converted, TILINGS | {"norm": Tiling.whole((600,), "float64", 3)}, 3)
        with pytest.raises(CheckpointError, match="one was quantised or converted"):
            check_deltas([Delta.open(path)], Catalog.open(tmp_path / "v9"))
        shutil.rmtree(tmp_path / "v9")
        with pytest.raises(CheckpointError, match="its name says version 7, and version 8 was asked for"):
            write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "weight_v000007.safetensors", version=8)
    report = write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "weight_v000007.safetensors")
    assert (report.version, report.base_version) == (7, 6)
    assert Delta.open(tmp_path / "weight_v000007.safetensors").version == 7


def test_damaged_files_are_refused_or_right(tmp_path: Path) -> None:
    """Any byte of a delta changed, or its end cut off: a LowshardError and nothing written, or all is right."""
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "columns", "few", "step")}
    before = values_of(tilings)
    after = stepped(before, mode.rng("damaged"), 0.05)
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    path = delta(tmp_path / "a", tmp_path / "b", tmp_path / "d", 1)
    sound = path.read_bytes()
    right = 0
    cases = 600 if mode.full() else 40
    for case in range(cases):
        rng = random.Random(f"{mode.seed()} {case}")
        raw = bytearray(sound)
        if rng.random() < 0.2:
            raw = raw[: rng.randrange(len(raw))]
        else:
            for _ in range(rng.choice([1, 1, 3])):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
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
        path.write_bytes(sound)
    assert right < cases / 2


# ---- a writer that fails


def test_a_delta_that_fails_at_any_step_is_whole_or_not_there(tmp_path: Path) -> None:
    tilings = {n: t for n, t in TILINGS.items() if n in ("rows", "few")}
    before = values_of(tilings)
    after = stepped(before, mode.rng("steps"), 0.1)
    for name, values in (("a", before), ("b", after)):
        save_over(tmp_path / name, values, tilings, 3)
    top = tmp_path / "d"
    path = top / "d.safetensors"

    def attempt(steps: Steps) -> BaseException | None:
        top.mkdir()
        try:
            with watched(top, LoopbackTransport), counted(steps):
                write_delta(tmp_path / "a", tmp_path / "b", path)
        except (LowshardError, OSError, KeyboardInterrupt) as error:
            return error
        return None

    counting = Steps()
    assert attempt(counting) is None
    faults = [(at, fault) for at, fault in counting.faults if not fault.startswith("PeerFailed")]
    assert len(faults) > 40
    committed = 0
    for at, fault in mode.sample(faults, 30, "delta steps"):
        shutil.rmtree(top)
        error = attempt(Steps(at, fault))
        committed += path.exists()
        if path.exists():
            apply_deltas(tmp_path / "a", [path], tmp_path / "out")
            assert holds(tmp_path / "out", after)
        else:
            assert error is not None, (at, fault)
            assert not isinstance(error, NotDurable)
            write_delta(tmp_path / "a", tmp_path / "b", path)
        if (
            "unlink" not in counting.names[at - 1]
        ):  # what a failed removal has left goes with the next save there
            assert [p.name for p in top.iterdir()] == [path.name], (at, fault)
    assert committed
