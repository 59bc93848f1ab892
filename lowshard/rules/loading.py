"""load_rules: a rule file, a ready-made one, or rules from code, laid over a base as MaxText does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Literal, get_args

from lowshard.argument import brief, instance, items, one_of, quoted
from lowshard.argument import path as check_path
from lowshard.document import MAX_FILE_BYTES
from lowshard.errors import RulesError
from lowshard.nearest import nearest
from lowshard.reading import read_text
from lowshard.rules.axis_rule import AXIS_NAME_FORM, MAX_AXES, Rule, as_rules, is_axis_name
from lowshard.rules.finding import MODES, CheckReport, Mode
from lowshard.rules.ruleset import RuleSet
from lowshard.rules.schema import RuleFile, parse_rule_file

READY_MADE: tuple[str, ...] = (
    "default", "pure-fsdp", "ep-as-cp", "cp-as-ep", "pipeline-large-moe", "ep-as-dp", "shard-exp-on-fsdp",
    "fsdp-as-dp-for-attn", "fsdp-as-dp-for-attn-cp-as-ep-for-moe", "fsdp-as-dp-for-attn-cp-as-ep-for-moe-eval",
)  # fmt: skip
"""Rule files that come with lowshard; `load_rules` takes their names."""

Merge = Literal["file", "names"]
FilePath = str | os.PathLike[str]


def load_rules(
    source: FilePath,
    *,
    mode: Mode = "maxtext",
    base: FilePath | RuleSet | None = "default",
    merge: Merge = "file",
) -> RuleSet:
    """Return the rules of a file laid over a base.

    Args:
        source: one of READY_MADE, or the path of a YAML file (write ./default for a file of that name).
        mode: "maxtext": silent where MaxText is, so that the outcome is exactly MaxText's. "strict":
            what would silently change the outcome is an error.
        base: where keys come from that the file lacks; None: the file must have them.
        merge: "file": each key of the file replaces the base's whole (MaxText's `custom_mesh_and_rule`).
            "names": rules replace those of the same names and go to the end (a model file of MaxText's,
            or its command line); `override_logical_axis_rules: true` in the file drops all others.

    Raises:
        RulesError: no such file, no YAML, or a file that cannot be meant; the text starts with its place.
    """
    rules, report = read_rules_file(source, mode=mode, base=base, merge=merge)
    report.raise_first()
    assert rules is not None  # only an error leaves nothing
    return rules


def read_rules_file(
    source: FilePath,
    *,
    mode: Mode = "maxtext",
    base: FilePath | RuleSet | None = "default",
    merge: Merge = "file",
) -> tuple[RuleSet | None, CheckReport]:
    """Return the rules of a file as far as they can be read, and every finding; see `load_rules`."""
    _check_options(mode, base, merge)
    check_path(source, f"source is a path, or one of {', '.join(READY_MADE)}", RulesError)
    if isinstance(source, str) and source in READY_MADE:
        text, path = ready_made_text(source), f"ready/{source}.yml"
        base = None if source == "default" else base
    else:
        path = os.fspath(source)
        text = _read(path)
    return _combine(parse_rule_file(text, path, mode), mode, base, merge, is_base=source == "default")


def parse_rules(
    text: str,
    path: str = "<text>",
    *,
    mode: Mode = "maxtext",
    base: FilePath | RuleSet | None = "default",
    merge: Merge = "file",
) -> RuleSet:
    """Return the rules of a YAML text; arguments and errors as of `load_rules`, `path` for the messages."""
    _check_options(mode, base, merge)
    instance(text, str, "the rules are a text of YAML", RulesError)
    rules, report = _combine(parse_rule_file(text, path, mode), mode, base, merge)
    report.raise_first()
    assert rules is not None
    return rules


def make_rules(
    mesh_axes: Sequence[str],
    rules: Iterable[tuple[str, object] | Rule],
    *,
    data_sharding: Sequence[Sequence[str]] = (),
    mode: Mode = "maxtext",
    name: str = "<code>",
) -> RuleSet:
    """Return rules made in code.

    Args:
        mesh_axes: names, outermost first.
        rules: (logical name, axis | axes | None) pairs in order of priority, or Rule values.
        data_sharding: mesh axes for each dim of a batch.
        mode: see `load_rules`.
        name: what messages call it.

    Raises:
        RulesError: axes that are no distinct names, rules of another form.
    """
    one_of(mode, MODES, "mode", RulesError)
    rule = "mesh_axes is a sequence of axis names, outermost first"
    axes = items(mesh_axes, rule, RulesError)
    if not axes or not all(isinstance(a, str) and a for a in axes):
        raise RulesError(f"{rule}, got {quoted(mesh_axes)}")
    if len(axes) > MAX_AXES:
        raise RulesError(f"a mesh has at most {MAX_AXES} axes, got {len(axes)}")
    odd = next((a for a in axes if not is_axis_name(a)), None)
    if odd is not None:
        raise RulesError(f"a mesh axis is named as {AXIS_NAME_FORM}, got {quoted(odd)}", axis=odd)
    repeated = next((a for i, a in enumerate(axes) if a in axes[:i]), None)
    if repeated:
        raise RulesError(f"mesh_axes names {repeated!r} twice", axis=repeated)
    rule = "data_sharding is a sequence of mesh axes for each dim of a batch"
    dims = tuple(items(dim, rule, RulesError) for dim in items(data_sharding, rule, RulesError))
    if not all(isinstance(axis, str) and axis for dim in dims for axis in dim):
        raise RulesError(f"{rule}, got {brief(data_sharding)}")
    return RuleSet(name, mode, axes, dims, as_rules(rules), infers_context=True)


def _check_options(mode: object, base: object, merge: object) -> None:
    one_of(mode, MODES, "mode", RulesError)
    one_of(merge, get_args(Merge), "merge", RulesError)
    if base is not None and not isinstance(base, RuleSet):
        check_path(base, f"base is a path, one of {', '.join(READY_MADE)}, a RuleSet or None", RulesError)


def _read(path: str) -> str:
    if not os.path.exists(path) or os.path.isdir(path):
        known = f"give the path of a YAML file, or one of {', '.join(READY_MADE)}"
        raise RulesError(f"{path}: there is no such rule file; {known}{nearest(path, READY_MADE)}", path=path)
    return read_text(path, "rule file", partial(RulesError, path=path), MAX_FILE_BYTES)


def _combine(
    file: RuleFile, mode: Mode, base: FilePath | RuleSet | None, merge: Merge, *, is_base: bool = False
) -> tuple[RuleSet | None, CheckReport]:
    under: RuleSet | None
    whole = None not in (file.mesh_axes, file.rules, file.data_sharding) and merge == "file"
    if base is None or isinstance(base, RuleSet):
        under = base
    elif whole:
        under = None
    else:
        under = load_rules(base, mode=mode, base=None if base == "default" else "default")
    mesh_axes = file.mesh_axes if file.mesh_axes is not None else under.mesh_axes if under else None
    if mesh_axes is None:
        report = CheckReport.of(file.findings)
        if report.ok:
            raise RulesError(f"{file.path}: the file lacks mesh_axes, and there is no base", path=file.path)
        return None, report
    findings = file.findings
    if merge == "names":  # only then the key says something, and MaxText fails on what is no truth value
        findings = tuple(replace(f, severity="error") if f.code == "override-form" else f for f in findings)
    rules = file.rules if file.rules is not None else ()
    if file.rules is None or merge == "names":
        old = under.logical_axis_rules if under else ()
        names = {r.name for r in rules}
        rules = (() if file.override else tuple(r for r in old if r.name not in names)) + rules
    data = file.data_sharding if file.data_sharding is not None else under.data_sharding if under else ()
    places = dict(under.places if under else ()) | dict(file.places)
    found = RuleSet(
        file.path, mode, mesh_axes, data, rules, file.extension, tuple(places.items()), file.context_sharding,
        infers_context=merge == "file" and not is_base, findings=findings,
    )  # fmt: skip
    return found, CheckReport.of(found.file_findings())


def ready_made_text(name: str) -> str:
    """Return the YAML text of a ready-made rule file, to start one's own from."""
    if name not in READY_MADE:
        raise RulesError(
            f"the ready-made rule files are {', '.join(READY_MADE)}, got {quoted(name)}{nearest(name, READY_MADE)}"
        )
    return files("lowshard.rules").joinpath("ready", f"{name}.yml").read_text(encoding="utf-8")
