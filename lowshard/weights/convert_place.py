"""Where the output of a conversion may lie: apart from all that is read, or in the place of all of the input."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.delta_file import Delta
from lowshard.checkpoint.hf_index import DATA_NAME, HF_INDEX, is_foreign
from lowshard.errors import CheckpointError


def own_file(source: str, target: str, catalog: Catalog, mxfp8: bool) -> str:
    """Return what a checkpoint with deltas goes into: the target, or the one file that all of it lies in."""
    is_own = os.path.isdir(target) and os.path.realpath(target) == os.path.realpath(_folder_of(source))
    is_one = _is_one_file(catalog, mxfp8) and catalog.files[0].endswith(".safetensors")
    return catalog.files[0] if is_own and is_one else target


def check_target(
    source: str, target: str, catalog: Catalog, deltas: Sequence[Delta], *, is_file: bool, merged_bytes: int | None,
    mxfp8: bool,
) -> None:  # fmt: skip
    """Compare the output's place with all that is read, and with what is there."""
    place, known = os.path.realpath(target), os.path.realpath(_folder_of(source))
    files = {os.path.realpath(file) for file in catalog.files} | ({known} if os.path.isfile(known) else set())
    is_all = place == known or (files == {place} and _is_one_file(catalog, mxfp8))
    is_part = place == known or place in (files if is_file else set(map(os.path.dirname, files)))
    if is_part and not (is_all and deltas):
        raise CheckpointError(
            f"{target}: is the input, is a file of the input, or holds one: the output is another folder or file than "
            "the input. With --apply it may be the input, all of it"
        )
    if place in {os.path.realpath(delta.where) for delta in deltas}:
        raise CheckpointError(f"{target}: is a delta that is applied: the output is another folder or file")
    if is_file:
        if os.path.isdir(target):
            raise CheckpointError(
                f"{target}: is a folder; a name that ends in .safetensors is that of one merged file"
            )
        folder = Path(target).parent
        if not os.path.isdir(folder):
            raise CheckpointError(f"{target}: there is no folder {folder}; make it first")
        return
    if not os.path.isdir(target) and (os.path.lexists(target) or target.endswith(".safetensors")):
        raise CheckpointError(
            f"{target}: is a file, or called as one, and the output is a folder here: give the name of one (with "
            "--merged the output is one file where its name ends in .safetensors)"
        )
    if is_all and not all(DATA_NAME.fullmatch(os.path.basename(file)) for file in catalog.files):
        raise CheckpointError(
            f"{target}: has files of another program, which cannot be switched to a new version in one step: give "
            "another folder"
        )
    if merged_bytes is not None:
        _check_merged(Path(target), merged_bytes)


def _check_merged(target: Path, file_bytes: int) -> None:
    if file_bytes < 1:
        raise CheckpointError(f"a file holds 1 byte or more, got {file_bytes}")
    has_index = os.path.exists(target / HF_INDEX) and is_foreign(target)
    if has_index or os.path.exists(target / "model.safetensors"):
        raise CheckpointError(
            f"{target}: holds another checkpoint (model.safetensors or {HF_INDEX}), which other readers would take "
            "for this one: give another folder"
        )


def _folder_of(path: str) -> str:
    """Return what a checkpoint is known by: its folder, also where its index was given, or its file."""
    return os.path.dirname(path) or "." if os.path.basename(path) in (INDEX_NAME, HF_INDEX) else path


def _is_one_file(catalog: Catalog, mxfp8: bool) -> bool:
    """Return whether all of a plain checkpoint lies in one file, and an index beside it still holds for a new one."""
    return (
        catalog.num_ranks is None
        and len(catalog.files) == 1
        and not mxfp8
        and all(tensor.parts for tensor in catalog.tensors.values())
    )
