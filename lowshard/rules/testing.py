"""A check for users' own tests: the shardings a configuration gives are the ones that were agreed on.

    from lowshard.rules import load_rules
    from lowshard.rules.testing import assert_matches_golden

    def test_shardings():
        rules = load_rules("configs/my-rules.yml")
        assert_matches_golden(rules, "goldens/my-model", devices=16, ici={"fsdp": -1, "expert": 4})

The folder holds a logical_shardings.json, as MaxText's dump writes it, and the named_shardings.json that
is compared byte for byte; an input_shardings.json, where there is one, is compared too. After a change
that is meant, `LOWSHARD_UPDATE_GOLDENS=1 pytest` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from lowshard.errors import RulesError, VerificationError
from lowshard.mesh import DeviceMesh
from lowshard.rules.comparison import compare_dumps
from lowshard.rules.golden import (
    FILE_NAMES,
    Dump,
    activation_shardings,
    dump_text,
    named_shardings,
    parse_dump,
    read_dump,
)
from lowshard.rules.ruleset import RuleSet
from lowshard.rules.topology import Sizes
from lowshard.settings import UPDATE_GOLDENS

__all__ = ["assert_matches_golden", "made_goldens"]


def __dir__() -> list[str]:
    return sorted(__all__)


def assert_matches_golden(
    rules: RuleSet,
    golden: str | os.PathLike[str],
    *,
    devices: int | None = None,
    slices: int = 1,
    ici: Sizes | None = None,
    dcn: Sizes | None = None,
    mesh: DeviceMesh | None = None,
    tensors: object = None,
    update: bool | None = None,
) -> None:
    """Check that rules give the shardings of a golden file, byte for byte.

    Args:
        rules: the rule set.
        golden: a named_shardings.json, or a folder with one (and perhaps an input_shardings.json).
        devices: as of `RuleSet.mesh`, with the next three; or give `mesh`.
        slices: see devices.
        ici: see devices.
        dcn: see devices.
        mesh: the mesh, in place of sizes.
        tensors: what is sharded, as for `RuleSet.check`; None: the logical_shardings.json beside
            the golden file.
        update: write the golden file in place of comparing; None: where LOWSHARD_UPDATE_GOLDENS=1.

    Raises:
        VerificationError: (an AssertionError) the golden file is missing or says something else; the
            text has the changes, grouped, with their bytes a device.
        RulesError: the configuration cannot be resolved.
    """
    if (mesh is None) == (devices is None):
        raise RulesError("assert_matches_golden takes devices (with slices, ici, dcn) or a mesh")
    if mesh is None:
        rules, mesh = rules.bind(devices or 0, ici, slices, dcn)
    write = UPDATE_GOLDENS.choice() == "1" if update is None else update
    for path, made in made_goldens(rules, mesh, golden, tensors).items():
        _compare(path, made, write)


def made_goldens(
    rules: RuleSet, mesh: DeviceMesh, golden: str | os.PathLike[str], tensors: object = None
) -> dict[Path, str]:
    """Return, by golden file, the text that rules give now: the named file, and a folder's activation file.

    Args:
        rules: the rule set.
        mesh: the mesh.
        golden: a named_shardings.json, or a folder with one (and perhaps an input_shardings.json).
        tensors: what is sharded; None: the logical_shardings.json beside the golden file.

    Raises:
        RulesError: no such logical file, a damaged one, or a configuration that cannot be resolved.
    """
    path = Path(golden)
    whole = path.is_dir() or not path.suffix
    folder = path if whole else path.parent
    if tensors is None:
        tensors = read_dump(folder / FILE_NAMES["logical"]).tensors()
    made = {folder / FILE_NAMES["named"] if whole else path: dump_text(named_shardings(rules, mesh, tensors))}
    traced = folder / FILE_NAMES["activations"]
    if whole and traced.exists():
        made[traced] = dump_text(activation_shardings(rules, mesh, read_dump(traced).activations()))
    return made


def _compare(golden: Path, made: str, write: bool) -> None:
    if write:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(made, encoding="utf-8")
        return
    again = f"if the change is meant, run again with {UPDATE_GOLDENS.name}=1"
    try:
        kept = golden.read_bytes()
    except OSError as error:
        raise VerificationError(
            f"the golden file {golden} is missing or unreadable ({error}); {again}"
        ) from error
    if kept == made.encode():
        return
    try:
        old: Dump = read_dump(golden)
    except RulesError as error:
        raise VerificationError(f"the golden file is damaged: {error}; {again}") from error
    difference = compare_dumps(old, parse_dump(made, "what the rules give now"))
    text = str(difference)
    if difference.same:
        text = f"{golden}: the same entries in another form (order, white space)"
    raise VerificationError(f"{text}\n{again}")
