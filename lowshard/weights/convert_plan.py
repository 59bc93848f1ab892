"""The plan of a conversion: what a checkpoint on disk is read as, and which boxes go into which output file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.block_format import MXFP8, BlockFormat
from lowshard.box import Box, full_box
from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.checkpoint_index import (
    DATA_NAME,
    HF_INDEX,
    INDEX_NAME,
    SIZES,
    files_of_set,
    is_foreign,
)
from lowshard.checkpoint.delta_file import Delta, check_deltas, open_deltas
from lowshard.checkpoint.header import PACKED_BITS, read_header
from lowshard.checkpoint.read_shares import Share, shares
from lowshard.errors import CheckpointError, ShardingError
from lowshard.tiling import Tile, Tiling
from lowshard.weights.checkpoint_grid import Grid, RuledGrid, in_rank_order, rank_tilings
from lowshard.weights.name_pattern import Align, NamePatterns, Sizes, read_config
from lowshard.weights.quantization import Quantization
from lowshard.weights.save import Item, items_of
from lowshard.weights.scale_rules import all_scales
from lowshard.weights.sharded_load import saved_tilings
from lowshard.weights.sharding_strategy import ShardingStrategy

MIN_MEMORY_BYTES = 256_000_000
FORMAT = MXFP8["e4m3"]
"""What `mxfp8` stores linear weights as."""
_NAME = "mxfp8-quantized"
_NOT_LINEAR = {"embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "embeddings", "pooler"}

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name."""


@dataclass(frozen=True)
class Settings:
    """One conversion. Values that a rank started elsewhere can be told as JSON."""

    source: str
    target: str
    strategies: str | None
    to: str
    was: str | None = None
    mxfp8: bool = False
    memory_bytes: int = 2_000_000_000
    num_heads: int | None = None
    num_kv_heads: int | None = None
    verify: bool = True
    to_rules: str | None = None
    from_rules: str | None = None
    merged: bool = False
    """Whole tensors: one plain file where the target ends in .safetensors, else files of at most file_bytes and
    an index of Hugging Face's."""
    file_bytes: int = 5_000_000_000
    align: Align = None
    deltas: tuple[str, ...] = ()
    """Deltas that are applied on the way. Without `to` and `merged` the target then lies as the source does, whose
    place it may take."""

    @property
    def keeps_layout(self) -> bool:
        """Whether the target lies as the source does."""
        return bool(self.deltas) and not self.to and not self.merged

    def to_json(self) -> str:
        """Return one line that `from_json` reads."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        given = ((f, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{f.name} {brief(v)}" for f, v in given if v not in (f.default, None, ""))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        given = json.loads(text)
        return cls(**given | {"deltas": tuple(given["deltas"])})


@dataclass(frozen=True)
class ConvertPlan:
    """Which boxes go into which output file."""

    catalog: Catalog
    num_ranks: int
    tilings: Mapping[str, Tiling]
    strategies: Mapping[str, str]
    quantised: Mapping[str, BlockFormat]
    """Of the tensors that are quantised, how they are stored."""
    merged: bool
    """Whole tensors in each file, those without elements too; what is a rank elsewhere is a file here."""
    deltas: tuple[Delta, ...]
    place: str
    """The folder or file that is put in place: the settings' target, or the one file of a plain folder that is that."""
    is_hugging_face: bool
    """The place is a folder as transformers writes it, without an index of ours."""
    told_scales: Mapping[str, str]
    """There, the MXFP8 weights that its config.json is to speak of, by their scales, which are stored as uint8."""

    @classmethod
    def of(cls, settings: Settings) -> ConvertPlan:
        """Return the plan of a conversion. No tensor data is read."""
        if settings.num_heads is None and settings.num_kv_heads is not None:
            raise ShardingError("--kv-heads goes with --heads; without both, config.json beside IN has them")
        catalog = _source(settings)
        with as_damage(*settings.deltas):
            deltas = open_deltas(settings.deltas) if settings.deltas else ()
        if settings.keeps_layout and _holds_whole_tensors(catalog):
            settings = replace(settings, merged=True, target=_own_file(settings, catalog))
        _check_target(settings, catalog, deltas)
        if settings.memory_bytes < MIN_MEMORY_BYTES:
            raise CheckpointError(
                f"--memory is at least {MIN_MEMORY_BYTES // 10**6}MB (Python and its libraries need half of it), got "
                f"{settings.memory_bytes / 1e6:g}MB"
            )
        check_deltas(deltas, catalog)
        shapes = {name: (t.dtype, t.shape) for name, t in catalog.tensors.items()}
        said = {name: (t.dtype, t.said_shape) for name, t in catalog.tensors.items()}
        quantised = _quantised(shapes, catalog.where) if settings.mxfp8 else {}
        made: Mapping[str, tuple[Tiling, object]]
        if settings.merged:
            count, made = _whole_files(shapes, quantised, settings)
        elif settings.keeps_layout:
            assert catalog.num_ranks is not None  # else it is merged
            count, kept = catalog.num_ranks, saved_tilings(catalog, catalog.num_ranks)
            made = {name: (kept[name], t.strategy or "as before") for name, t in catalog.tensors.items()}
        elif settings.to_rules is not None:
            ruled = RuledGrid.parse(settings.to_rules, settings.to)
            count, made = ruled.num_ranks, ruled.tilings(said, _sizes(settings).weight_block)
        else:
            grid, stored = Grid.parse(settings.to), dict(said)
            for name, form in quantised.items() if settings.align else ():
                stored = {**form.stored(name, shapes[name][1]), **stored}
            cut = grid.tilings(stored, patterns_of(settings), _sizes(settings), settings.align)
            count, made = grid.num_ranks, {name: cut[name] for name in shapes}
        made = {n: (_in_memory(n, t, shapes[n][1]), strategy) for n, (t, strategy) in made.items()}
        for name, form in quantised.items():
            _check_blocks(name, form, *made[name])
        is_hugging_face = _is_hugging_face(settings)
        return cls(
            catalog, count, {n: t for n, (t, _) in made.items()}, {n: str(s) for n, (_, s) in made.items()},
            quantised, settings.merged, deltas, settings.target, is_hugging_face,
            _told_scales(settings, shapes, quantised, is_hugging_face),
        )  # fmt: skip

    @property
    def is_one_file(self) -> bool:
        """Whether the output is one plain file."""
        return self.merged and self.place.endswith(".safetensors")

    @property
    def final(self) -> Path:
        """What is put in place last: the one plain file, or the index."""
        index = HF_INDEX if self.is_hugging_face else INDEX_NAME
        return Path(self.place) if self.is_one_file else Path(self.place) / index

    def items(self, rank: int) -> list[Item]:
        """Return what goes into the output file of a rank; a quantised tensor's codes are followed by its scales."""
        boxes: list[tuple[str, str, Box]] = []
        for share in self._shares.get(rank, ()):
            form, tiling = self.quantised.get(share.name), self.tilings[share.name]
            if form is None:
                boxes.append((share.name, self.saved[share.name][0].dtype, share.box))
                continue
            for part, box in form.boxes(share.name, share.box, tiling.shape).items():
                boxes.append((part, self.saved[part][0].dtype, box))
        if self.merged:
            known = {box[0]: box for box in boxes}
            mine = ((name, tiling) for name, (tiling, _) in self.saved.items() if rank in tiling)
            boxes = [known.get(name, (name, t.dtype, full_box(t.shape))) for name, t in mine]
        return items_of(boxes, {name: tiling.shape for name, (tiling, _) in self.saved.items()})

    def values(self, item: Item) -> Box:
        """Return the box of the input that an item is made of; of a quantised tensor, from its codes."""
        form = self.quantised.get(item.name)
        return item.box if form is None else form.code_values(item.box)

    @cached_property
    def _shares(self) -> dict[int, list[Share]]:
        """By rank, what it writes of each tensor; of quantised ones whole blocks, as their scales are shared out."""
        grids = {
            name: tiling.stored(name, form)[name + form.suffix]
            if (form := self.quantised.get(name))
            else tiling
            for name, tiling in self.tilings.items()
        }
        found: dict[int, list[Share]] = {}
        for share in shares(grids):
            if form := self.quantised.get(share.name):
                share = replace(share, box=form.values(share.box, self.tilings[share.name].shape))
            found.setdefault(share.rank, []).append(share)
        return found

    @cached_property
    def saved(self) -> dict[str, tuple[Tiling, str]]:
        """Which rank holds what of every output tensor, and its strategy, by name."""
        found: dict[str, tuple[Tiling, str]] = {}
        for name, tiling in self.tilings.items():
            said = self.strategies[name]
            form = self.quantised.get(name)
            if form is None:
                found[name] = (tiling, said)
                continue
            for part, stored in tiling.stored(name, form).items():
                found[part] = (stored, said if part == name else f"scales of {name}")
        for name in self.told_scales:
            found[name] = (replace(found[name][0], dtype="uint8"), found[name][1])
        return found

    @property
    def metadata(self) -> dict[str, str] | None:
        """Text by text, as the input has it; None where it has none."""
        found = {key: value for key, value in self.catalog.metadata.items() if key not in SIZES}
        return found if found or self.catalog.has_metadata else None


# ---- the output's tensors


def _quantised(shapes: Shapes, where: str) -> dict[str, BlockFormat]:
    """Return the linear weights: float matrices (or stacked ones), no embedding, head or router."""
    scales = all_scales({name: shape for name, (_, shape) in shapes.items()})
    linear = [
        name
        for name, (dtype, shape) in sorted(shapes.items())
        if len(shape) >= 2
        and (dtype in ("float32", "bfloat16", "float16") or dtypes.get(dtype).kind == "opaque")
        and name.rpartition(".")[2] != "bias"
        and not _NOT_LINEAR & set(name.split("."))
        and name not in scales
    ]
    if opaque := [name for name in linear if dtypes.get(shapes[name][0]).kind == "opaque"]:
        raise ShardingError(
            f"{where}: --mxfp8 quantises values, and lowshard does not compute with {opaque[0]!r}, which is "
            f"{dtypes.get(shapes[opaque[0]][0]).safetensors}: reshard without --mxfp8"
        )
    block = FORMAT.block[-1]
    found = {name: FORMAT for name in linear if shapes[name][1][-1] % block == 0}
    if linear and not found:
        raise ShardingError(
            f"{where}: --mxfp8 quantises linear weights whose last dim is a multiple of {block}, and none is: "
            f"{linear[0]} is {list(shapes[linear[0]][1])}; pad them, or leave --mxfp8 out"
        )
    for name, form in found.items():
        if name + form.suffix in shapes:
            raise ShardingError(
                f"{where}: the scales of {name!r} as MXFP8 are called {name + form.suffix!r}, and the checkpoint has "
                "another tensor of that name: rename that one, or reshard without --mxfp8"
            )
    return found


def _check_blocks(name: str, form: BlockFormat, tiling: Tiling, strategy: object) -> None:
    """Raise ShardingError where a shard would begin or end within a block."""
    if not isinstance(strategy, ShardingStrategy):
        tiling.stored(name, form)
        return
    for index in range(strategy.num_devices):  # which says what to do instead
        try:
            Quantization.of(form).pieces(strategy, tiling.shape, index)
        except ShardingError as error:
            raise ShardingError(
                f"{name} {list(tiling.shape)}: {error}; or reshard with --align blocks"
            ) from error


def _in_memory(name: str, tiling: Tiling, shape: tuple[int, ...]) -> Tiling:
    """Return a tiling in the bytes that elements of 4 and 6 bits lie in, or raise ShardingError where it cuts one."""
    if tiling.shape == shape:
        return tiling
    whole = full_box(shape)
    if len(tiling.holders()) < 2:
        tiles = tuple(tuple(Tile(whole, whole) for _ in mine[:1]) for mine in tiling.rank_tiles)
        return Tiling(
            shape, tiling.dtype, tiles, tuple(None if s is None else shape for s in tiling.local_shapes)
        )
    kind = dtypes.get(tiling.dtype).safetensors
    form = BlockFormat(kind, PACKED_BITS[kind], (1,), "uint8", "uint8", "low_first")
    return replace(tiling.stored(name, form)[name], dtype=tiling.dtype)


def _whole_files(
    shapes: Shapes, quantised: Mapping[str, BlockFormat], settings: Settings
) -> tuple[int, dict[str, tuple[Tiling, str]]]:
    """Return the number of files, and tilings over as many "ranks", each tensor whole on one, in the input's order."""
    one_file = settings.target.endswith(".safetensors")
    numbers, number, filled_bytes = dict[str, int](), 0, 0
    for name, (dtype, shape) in shapes.items():
        form = quantised.get(name)
        stored = [(dtype, shape)] if form is None else form.stored(name, shape).values()
        size_bytes = sum(prod(s) * dtypes.get(d).itemsize_bytes for d, s in stored)
        if filled_bytes and filled_bytes + size_bytes > settings.file_bytes and not one_file:
            number, filled_bytes = number + 1, 0
        filled_bytes += size_bytes
        numbers[name] = number
    made = {}
    for name, (dtype, shape) in shapes.items():
        holds = [file == numbers[name] for file in range(number + 1)]
        tiles = tuple((Tile(full_box(shape), full_box(shape)),) if it else () for it in holds)
        made[name] = (
            Tiling(shape, dtype, tiles, tuple(shape if it else None for it in holds)),
            "whole in one file",
        )
    return number + 1, made


# ---- the output's place


def _checkpoint_path(path: str) -> str:
    """Return the folder of a checkpoint, also where its index was given, or its file."""
    return os.path.dirname(path) or "." if path.endswith((".json", ".metadata")) else path


def _is_hugging_face(settings: Settings) -> bool:
    """Return whether config.json lies beside whole tensors in a folder: beside the input, or the output."""
    source, target = Path(_checkpoint_path(settings.source)), Path(settings.target)
    places = source if source.is_dir() else source.parent, target
    is_ours = target.suffix == ".safetensors" or (target / INDEX_NAME).exists()
    return settings.merged and not is_ours and any((place / "config.json").is_file() for place in places)


def _told_scales(
    settings: Settings, shapes: Shapes, quantised: Mapping[str, BlockFormat], is_hugging_face: bool
) -> Mapping[str, str]:
    stored = dict(shapes)
    for name, form in quantised.items():
        stored |= {part: (t.dtype, t.shape) for part, t in form.stored(name, shapes[name][1]).items()}
    scales, target = mxfp8_scales(stored), Path(settings.target)
    if is_hugging_face:
        return check_config(config_of(settings), scales, stored, settings.target, bool(quantised))
    if scales and target.suffix == ".safetensors" and (target.parent / "config.json").is_file():
        raise CheckpointError(
            f"{target}: config.json beside it does not say that weights are MXFP8, so other libraries would take codes "
            "for values: give a folder as OUT, whose config.json says it, or a file elsewhere"
        )
    return {}


def _holds_whole_tensors(catalog: Catalog) -> bool:
    return catalog.num_ranks is None or (
        catalog.num_ranks == 1 and all(len(tensor.parts) < 2 for tensor in catalog.tensors.values())
    )


def _is_one_file(catalog: Catalog, mxfp8: bool) -> bool:
    """Return whether all of a plain checkpoint lies in one file, and an index beside it still holds for a new one."""
    has_parts = all(tensor.parts for tensor in catalog.tensors.values())
    return catalog.num_ranks is None and len(catalog.files) == 1 and not mxfp8 and has_parts


def _own_file(settings: Settings, catalog: Catalog) -> str:
    """Return the target, or the one file of a plain folder where that folder is source and target."""
    target, source = settings.target, _checkpoint_path(settings.source)
    is_own = os.path.isdir(target) and os.path.realpath(target) == os.path.realpath(source)
    is_one = _is_one_file(catalog, settings.mxfp8) and catalog.files[0].endswith(".safetensors")
    return catalog.files[0] if is_own and is_one else target


def _check_target(settings: Settings, catalog: Catalog, deltas: tuple[Delta, ...]) -> None:
    """Raise CheckpointError unless the output lies apart from all that is read, or takes the place of all the input."""
    target, is_file = settings.target, settings.merged and settings.target.endswith(".safetensors")
    place, known = os.path.realpath(target), os.path.realpath(_checkpoint_path(settings.source))
    files = {os.path.realpath(file) for file in catalog.files} | ({known} if os.path.isfile(known) else set())
    is_all = place == known or (files == {place} and _is_one_file(catalog, settings.mxfp8))
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
    if settings.merged:
        if settings.file_bytes < 1:
            raise CheckpointError(f"a file holds 1 byte or more, got {settings.file_bytes}")
        if is_foreign(Path(target)) or os.path.exists(os.path.join(target, "model.safetensors")):
            raise CheckpointError(
                f"{target}: holds another checkpoint (model.safetensors or {HF_INDEX}), which other readers would "
                "take for this one: give another folder"
            )


# ---- the input


@contextmanager
def as_damage(*paths: str) -> Iterator[None]:
    """Have the command end with exit code 1 where what is there cannot be read, as `lowshard inspect` does."""
    try:
        yield
    except CheckpointError as error:
        if all(map(os.path.exists, paths)):
            error.exit_code = 1
        raise


def config_of(settings: Settings) -> Path:
    """Return the path of the config.json beside the input, or else in the output; it need not be there."""
    source = Path(_checkpoint_path(settings.source))
    beside = (source if os.path.isdir(source) else source.parent) / "config.json"
    return beside if beside.is_file() else Path(settings.target) / "config.json"


def _sizes(settings: Settings) -> Sizes:
    """Return the numbers of heads as they were given, and what a config.json beside the input has."""
    found = Sizes.beside(settings.source)  # a strategy that asks for heads says that they are missing
    if settings.num_heads is None:
        return found
    return replace(found, num_heads=settings.num_heads, num_kv_heads=settings.num_kv_heads)


def patterns_of(settings: Settings) -> NamePatterns:
    """Return the name patterns that were asked for, or those for the model_type of a config.json beside the input."""
    if settings.strategies is not None:
        return NamePatterns.load(settings.strategies)
    if os.path.exists(config_of(settings)):
        return NamePatterns.of_model(config_of(settings))
    raise ShardingError(
        "how tensors are sharded comes from the model_type of a config.json beside the checkpoint, from name patterns "
        "(--strategies llama.yaml) or from a mesh-and-rule file (--to-rules, and --from-rules for files of ranks "
        "without an index); there is none of them"
    )


def _source(settings: Settings) -> Catalog:
    """Return the input's catalog; files of ranks without an index are understood by `was`."""
    path = Path(settings.source)
    was: Grid | RuledGrid | None = None
    if settings.from_rules is not None:
        if settings.was is None:
            raise ShardingError("--from-rules needs the sizes of its mesh axes: --from fsdp=4,expert=2")
        was = RuledGrid.parse(settings.from_rules, settings.was)
    elif settings.was is not None:
        was = Grid.parse(settings.was)
    files = in_rank_order(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
    if (count := files_of_set(path.name)) > 1 and os.path.isfile(path):
        raise CheckpointError(
            f"{path}: this is one of {count} files that hold a checkpoint together: pass their folder"
        )
    if was is None or was.num_ranks == 1 or not files or any(path.glob("*.index.json")):
        with as_damage(settings.source):
            catalog = Catalog.open(path)
        if was is not None and was.num_ranks != (catalog.num_ranks or 1):
            found = f"was saved by {catalog.num_ranks} ranks" if catalog.num_ranks else "holds whole tensors"
            raise CheckpointError(f"{path}: {found}, --from {was} has {was.num_ranks} ranks: leave it out")
        return catalog
    if len(files) != was.num_ranks:
        raise CheckpointError(
            f"{path}: --from {was} means {was.num_ranks} files, one a rank, or an index; there are {len(files)}"
        )
    with as_damage(settings.source):
        if any("lowshard" in read_header(file).metadata for file in files):
            raise CheckpointError(
                f"{path}: the files hold slices of a sharded checkpoint, and {INDEX_NAME}, which says of what, is "
                "missing: put it back"
            )
    if isinstance(was, RuledGrid):
        return Catalog.of_rank_files(files, was.rank_tilings(files, _sizes(settings).weight_block))
    return Catalog.of_rank_files(files, rank_tilings(files, was, patterns_of(settings), _sizes(settings)))


# ---- MXFP8 in a folder that transformers and vLLM read: `mxfp8-quantized` of the library compressed-tensors: codes
# `X.weight` in F8_E4M3 [out, in], scales `X.weight_scale` in U8 [out, in / 32], and what config.json says of them.


def mxfp8_scales(shapes: Shapes) -> dict[str, str]:
    """Return, of tensors by dtype and shape, the names of MXFP8 weights by those of their scales."""
    found = {}
    for name, (dtype, shape) in shapes.items():
        if dtype == FORMAT.element and shape and shape[-1] % FORMAT.block[-1] == 0:
            scale = name + FORMAT.suffix
            held = shapes.get(scale, ("", ()))
            if held[0] in (FORMAT.scale, "uint8") and held[1] == FORMAT.stored(name, shape)[scale].shape:
                found[scale] = name
    return found


def check_config(
    path: Path, scales: Mapping[str, str], shapes: Shapes, where: str, is_new: bool
) -> dict[str, str]:
    """Return the scales that the config.json at `path` has to speak of: none where it says another quantisation."""
    said = read_config(path)[1].get("quantization_config") if scales else None
    has_own = said is not None and not (isinstance(said, dict) and said.get("format") == _NAME)
    if not scales or (has_own and not is_new):
        return {}
    other = next((w for w in scales.values() if not w.endswith(".weight") or len(shapes[w][1]) != 2), None)
    if has_own or other is not None:
        why = (
            f"{path} has a quantization_config already"
            if has_own
            else f"{other} {list(shapes[other or ''][1])} is no weight [out, in] of a linear layer"
        )
        raise CheckpointError(
            f"{where}: a folder for transformers says of MXFP8 weights what they are by compressed-tensors' "
            f"quantization_config, and here that cannot be: {why}; write one file instead (OUT.safetensors), or "
            "leave --merged out"
        )
    return dict(scales)


def config_text(path: Path, scales: Mapping[str, str], shapes: Shapes) -> str:
    """Return the text of the config.json at `path` with what the MXFP8 weights are, and which layers are none."""
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
               "dynamic": False, "scale_dtype": "torch.uint8"}  # fmt: skip
    quantised = set(scales.values())
    plain = [n for n in shapes if n.endswith(".weight") and n not in quantised and len(shapes[n][1]) == 2]
    group = {"targets": ["Linear"], "format": _NAME, "weights": weights,
             "input_activations": weights | {"dynamic": True}}  # fmt: skip
    made = {
        "quant_method": "compressed-tensors", "format": _NAME, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [name.removesuffix(".weight") for name in plain],
    }  # fmt: skip
    return json.dumps(read_config(path)[1] | {"quantization_config": made}, indent=2) + "\n"
