"""Reads a rule file's keys, and finds what is wrong with them.

Keys and accepted forms are those of MaxText (commit e591f30, `custom_mesh_and_rule`): `mesh_axes`, `data_sharding`,
`logical_axis_rules`; `context_sharding` is read by us and ignored by MaxText. Our own extensions are below one more
key, `lowshard`, which MaxText ignores as it ignores every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowshard.argument import quoted
from lowshard.document import Node, Where, parse_document
from lowshard.nearest import nearest
from lowshard.rules.axis_rule import AXIS_NAME_FORM, MAX_AXES, Rule, is_axis_name, read_map, rules_error
from lowshard.rules.extension import Extension, read_extension
from lowshard.rules.finding import Finding, Mode, find

Axes = tuple[str, ...]
DataSharding = tuple[Axes, ...]

KEYS = ("mesh_axes", "data_sharding", "context_sharding", "logical_axis_rules")
_OVERRIDE = "override_logical_axis_rules"
_OVERRIDES, _KEPT = ("true", "yes", "on", "y", "t", "1"), ("false", "no", "off", "n", "f", "0")
"""What MaxText's settings (pydantic) take for true and for false, in small letters."""
_OURS = "lowshard"
_MOST_UNKNOWN = 50
_RULE_FORM = "a rule is a list of two: ['embed', ['fsdp', 'expert']], ['embed', 'fsdp'] or ['embed', []]"


@dataclass(frozen=True)
class RuleFile:
    """The content of one file. None: the file lacks the key."""

    path: str
    mesh_axes: Axes | None = None
    data_sharding: DataSharding | None = None
    context_sharding: str | None = None
    rules: tuple[Rule, ...] | None = None
    override: bool = False
    """`override_logical_axis_rules`: merged by name, the file's rules replace all others."""
    extension: Extension = field(default_factory=Extension)
    places: tuple[tuple[str, Where], ...] = ()
    """Where each key stands."""
    findings: tuple[Finding, ...] = ()


def parse_rule_file(text: str, path: str, mode: Mode) -> RuleFile:
    """Return a file's content with every finding; only invalid YAML raises."""
    node = parse_document(text, path, rules_error)
    if node is None or node.kind == "null":
        return RuleFile(path)
    if node.kind != "map":
        text = f"a rule file is a map with the keys {', '.join(KEYS)}, got {node}"
        return RuleFile(path, findings=(find("file-form", mode, text, node.where),))
    return _Reader(path, mode).read(node)


def read_rules(node: Node, mode: Mode, findings: list[Finding]) -> tuple[Rule, ...]:
    """Return the rules of a list of rules; adds what is wrong with it to `findings`."""
    if node.kind != "list":
        what = "a map" if node.kind == "map" else "nothing" if node.kind == "null" else str(node)
        text = f"logical_axis_rules is a list of rules, got {what}; {_RULE_FORM}"
        findings.append(find("rules-form", mode, text, node.where))
        return ()
    rules = []
    for item in node.items:
        if item.kind != "list" or len(item.items) != 2:
            what = "a map" if item.kind == "map" else "no list"
            if item.kind == "list":
                what = f"{len(item.items)} item{'s' * (len(item.items) != 1)}"
            text = f"{_RULE_FORM}, got {item} ({what})"
            findings.append(find("rules-form", mode, text, item.where, rule=str(item)))
            continue
        name, target = item.items
        if name.kind != "text":
            text = f"a rule's name is a word, got {name} ({_yaml_kind(name)}): put it in quotes"
            findings.append(find("rule-name-form", mode, text, name.where, rule=str(item)))
            if name.kind in ("list", "map"):
                continue
        axes, fault = _target(target)
        # A name that is not text (null, 7) matches no logical name; keep the rule out of reach.
        rule = Rule(name.text, axes, item.where, fault)
        if name.kind == "text":
            rules.append(rule)
        if fault:
            findings.append(find("target-form", mode, fault, target.where, rule=str(item)))
        elif rule.repeated_axis:
            text = f"the target names the axis {rule.repeated_axis!r} twice; an axis shards a tensor once"
            found = find("target-repeats-axis", mode, text, target.where, rule=rule, axis=rule.repeated_axis)
            findings.append(found)
    return tuple(rules)


def _target(node: Node) -> tuple[Axes, str]:
    """Return a target's axes and, if it is invalid, why."""
    form = "a target is an axis name, a list of axis names, [] or null"
    if node.kind == "null":
        return (), ""
    if node.kind == "text":
        return (node.text,), "" if node.text else f"{form}, got an empty name"
    if node.kind == "list":
        bad = next((i for i in node.items if i.kind != "text" or not i.text), None)
        if bad is None:
            return tuple(i.text for i in node.items), ""
        return _leaves(node), f"{form}, got {node} (it holds {_yaml_kind(bad)})"
    return _leaves(node), f"{form}, got {node} ({_yaml_kind(node)})"


def _leaves(node: Node) -> Axes:
    # Conflicts are judged on all names below a target, also where no spec comes of it.
    if node.kind == "text":
        return (node.text,)
    below = node.items if node.kind == "list" else tuple(v for _, v in node.pairs)
    return tuple(dict.fromkeys(leaf for i in below for leaf in _leaves(i)))


class _Reader:
    """Reads one file's top map."""

    def __init__(self, path: str, mode: Mode) -> None:
        self._path = path
        self._mode: Mode = mode
        self._findings: list[Finding] = []

    def read(self, node: Node) -> RuleFile:
        entries = read_map(node)
        for key, (key_node, _) in entries.items():
            if key not in (*KEYS, _OVERRIDE, _OURS) and len(self._findings) < _MOST_UNKNOWN:
                self._unknown_key(key, key_node)
        values = {k: v for k, (_, v) in entries.items()}
        mesh_axes = self._mesh_axes(values["mesh_axes"]) if "mesh_axes" in values else None
        data = self._data_sharding(values["data_sharding"]) if "data_sharding" in values else None
        context = self._context(values["context_sharding"]) if "context_sharding" in values else None
        rules = None
        if "logical_axis_rules" in values:
            given = values["logical_axis_rules"]
            rules = read_rules(given, self._mode, self._findings)
            if given.kind == "list" and not given.items:
                self._add("rules-empty", "there are no rules: everything is replicated", given.where)
        extension = Extension()
        if _OURS in values:
            extension = read_extension(values[_OURS], self._mode, self._findings, read_rules)
        override = self._override(values[_OVERRIDE]) if _OVERRIDE in values else False
        return RuleFile(
            self._path, mesh_axes, data, context, rules,
            override,
            extension,
            tuple((k, v.where) for k, (v, _) in entries.items()),
            tuple(self._findings),
        )  # fmt: skip

    def _add(
        self, code: str, text: str, where: Where, *, rule: str | None = None, axis: str | None = None
    ) -> None:
        self._findings.append(find(code, self._mode, text, where, rule=rule, axis=axis))

    def _unknown_key(self, key: str, node: Node) -> None:
        near = nearest(key, (*KEYS, _OURS), 1, alike=0.75)
        if near:
            text = f"MaxText ignores the key {quoted(key)}{near}"
            self._add("key-misspelt", text, node.where)
        else:
            text = f"the key {quoted(key)} has no effect; the keys are {', '.join(KEYS)}, and {_OURS}"
            self._add("key-unknown", text, node.where)

    def _names(self, node: Node) -> Axes | None:
        if node.kind != "list" or not all(i.kind == "text" and i.text for i in node.items):
            return None
        return tuple(i.text for i in node.items)

    def _mesh_axes(self, node: Node) -> Axes | None:
        form = "mesh_axes is a list of axis names, outermost first, such as ['data', 'fsdp']"
        if node.kind == "text":
            text = f"{form}, got the plain word {quoted(node.text)}, which MaxText takes letter by letter"
            self._add("mesh-axes-form", text, node.where, axis=node.text)
            return None
        names = self._names(node)
        if not names:
            bad = next((i for i in node.items if i.kind != "text" or not i.text), node)
            kind = _yaml_kind(bad) if node.items else "no name"
            self._add("mesh-axes-form", f"{form}, got {node} ({kind})", bad.where, axis=str(bad))
            return None
        if len(names) > MAX_AXES:
            text = f"a mesh has at most {MAX_AXES} axes, got {len(names)}"
            self._add("mesh-axes-form", text, node.where, axis=names[MAX_AXES])
            return None
        for place, name in enumerate(names):
            if not is_axis_name(name):
                where = node.items[place].where
                self._add(
                    "mesh-axes-form",
                    f"a mesh axis is named as {AXIS_NAME_FORM}, got {quoted(name)}",
                    where,
                    axis=name,
                )
            if name in names[:place]:
                where = node.items[place].where
                self._add("mesh-axis-repeated", f"mesh_axes names {name!r} twice", where, axis=name)
        return tuple(dict.fromkeys(names))

    def _data_sharding(self, node: Node) -> DataSharding | None:
        form = "data_sharding is a list with one list of mesh axes for each dim, such as [['data', 'fsdp']]"
        if node.kind == "text":  # MaxText wraps a bare name, and a flat list given on its command line
            self._add("data-sharding-flat", f"{form}, got the plain word {quoted(node.text)}", node.where)
            return ((node.text,),)
        if node.kind != "list":
            self._add("data-sharding-form", f"{form}, got {node}", node.where)
            return None
        dims: list[Axes] = []
        for item in node.items:
            names: Sequence[str] | None = (
                (item.text,) if item.kind == "text" and item.text
                else () if item.kind == "null" else self._names(item)
            )  # fmt: skip
            if names is None:
                self._add("data-sharding-form", f"{form}, got {item} for dim {len(dims)}", item.where)
                return None
            dims.append(tuple(names))
        if any(i.kind == "text" for i in node.items):
            cut = ", ".join(f"dim {d} on {'+'.join(names) or 'nothing'}" for d, names in enumerate(dims))
            text = f"{form}; this flat list means {cut}"
            self._add("data-sharding-flat", text, node.where)
        return tuple(dims)

    def _override(self, node: Node) -> bool:
        text = node.text.lower() if node.kind in ("bool", "int", "text") else ""
        if text not in (*_OVERRIDES, *_KEPT):
            self._add("override-form", f"{_OVERRIDE} is true or false, got {node}", node.where)
        return text in _OVERRIDES

    def _context(self, node: Node) -> str | None:
        if node.kind != "text":
            text = f"context_sharding is the name of a mesh axis, got {node} ({_yaml_kind(node)})"
            self._add("context-sharding-at-odds", text, node.where)
            return None
        return node.text


def _yaml_kind(node: Node) -> str:
    kinds = {
        "list": "a list in it", "map": "a map", "null": "null", "bool": "a truth value in YAML 1.1",
        "int": "a number", "float": "a number", "other": "no plain word", "text": "an empty name",
    }  # fmt: skip
    return kinds[node.kind]
