"""Digests in checkpoints: the same however a checkpoint is cut, another for other content, compared by who reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Values, attention_and_more, on_ranks, save_over, values_of

from lowshard.checkpoint import Catalog, checkpoint_index
from lowshard.checkpoint.catalog import crc32
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.overview import look_at
from lowshard.cli import main
from lowshard.errors import LayoutError
from lowshard.reshard import digest, model_digest
from lowshard.tiling import Tiling
from lowshard.weights import load_sharded

VALUES = values_of(attention_and_more(3))


def run(*words: object) -> int:
    return main(list(map(str, words)))


def by_hand(values: Values) -> dict[str, str]:
    """Return what `digest` says of whole tensors."""
    tilings = attention_and_more(3)
    return digest({n: (Tiling.whole(v.shape, tilings[n].dtype), v) for n, v in values.items()})


def rewritten(path: Path, change: Any) -> None:
    """Change an index, and its own digest with it."""
    body = json.loads((path / INDEX_NAME).read_text())
    body.pop("digest")
    change(body)
    body["digest"] = checkpoint_index._digest(body)
    (path / INDEX_NAME).write_text(json.dumps(body))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_they_are_what_digest_says_however_it_is_cut(tmp_path: Path, ranks: int) -> None:
    save_over(tmp_path / "c", VALUES, attention_and_more(ranks), ranks)
    assert Catalog.open(tmp_path / "c").digests == by_hand(VALUES)


def test_a_checkpoint_that_is_cut_anew_has_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: replicate}]")
    cut = "--to", "tp=2,dp=2", "--strategies", tmp_path / "s.yaml"
    save_over(tmp_path / "a", VALUES, attention_and_more(3), 3)
    assert run("reshard", tmp_path / "a", tmp_path / "b", *cut) == 0
    right = model_digest(by_hand(VALUES))
    assert (
        f"digest: {right}, of {len(VALUES)} tensors compared with what {tmp_path / 'a'} says"
        in capsys.readouterr().out
    )
    assert run("reshard", tmp_path / "b", tmp_path / "m.safetensors", "--merged") == 0
    assert run("reshard", tmp_path / "m.safetensors", tmp_path / "c", *cut) == 0
    assert f"digest: {right}\n" in capsys.readouterr().out  # a plain file says nothing to compare with
    for name in "bc":
        assert Catalog.open(tmp_path / name).digests == by_hand(VALUES)
    for name in ("a", "b", "m.safetensors"):  # two jobs compare a model by one line
        assert run("inspect", tmp_path / name, "--verify") == 0
        assert f"\ndigest: {right}\n" in capsys.readouterr().out


def test_what_was_loaded_is_compared_in_one_line(tmp_path: Path) -> None:
    tilings = attention_and_more(3)
    save_over(tmp_path / "a", VALUES, tilings, 3)

    def job(comm: Any) -> bool:
        found = load_sharded(tmp_path / "a", comm)
        equal = digest(found.state, comm) == found.digests == by_hand(VALUES)
        found["norm"].view("uint8")[0] ^= 1
        return equal and digest(found.state, comm) != found.digests

    for ranks in (2, 3):
        assert all(on_ranks(ranks, job))


def test_content_that_is_not_what_the_index_says_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit has flipped, and its checksum was made right again: the digest is another."""
    save_over(tmp_path / "a", VALUES, attention_and_more(3), 3)
    part = Catalog.open(tmp_path / "a").tensors["gate_up"].parts[1]
    raw = bytearray(Path(part.file).read_bytes())
    raw[part.entry.start + 5] ^= 16
    Path(part.file).write_bytes(raw)

    def forged(body: dict[str, Any]) -> None:
        for row in body["tensors"]["gate_up"]["parts"]:
            if tuple(map(tuple, row["box"])) == part.box:
                row["crc32"] = crc32(bytes(raw[part.entry.start : part.entry.stop]))

    rewritten(tmp_path / "a", forged)
    assert run("inspect", tmp_path / "a", "--verify") == 1
    assert "tensor 'gate_up': its data is damaged: its digest is" in capsys.readouterr().out
    right = look_at(tmp_path / "a").digest
    assert right == model_digest(by_hand(VALUES))
    assert run("reshard", tmp_path / "a", tmp_path / "b.safetensors", "--merged") != 0
    assert "tensor 'gate_up': has the digest" in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()


def test_a_changed_tensor_changes_the_models_digest_alone(tmp_path: Path) -> None:
    right = by_hand(VALUES)
    assert model_digest(right) == model_digest(dict(reversed(right.items())))
    for name in right:
        assert model_digest(right | {name: "0" * 32}) != model_digest(right)
        assert model_digest({n: d for n, d in right.items() if n != name}) != model_digest(right)
    for wrong in (None, 3, {"w": 3}, {3: "w"}):
        with pytest.raises(LayoutError, match="digests are a mapping"):
            model_digest(wrong)  # type: ignore[arg-type]
