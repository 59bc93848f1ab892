"""One rule of a mesh-and-rule file, its place in the file, and errors that name both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lowshard.argument import brief, items, quoted
from lowshard.document import Node, Where
from lowshard.errors import RulesError

MESH_AXES: tuple[str, ...] = (
    "diloco", "data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_usp_ulysses",
    "context_autoregressive", "tensor", "tensor_sequence", "model", "expert", "autoregressive", "attn_dp",
    "attn_dp_expert",
)  # fmt: skip
"""The mesh axes MaxText has sizes for (MaxText commit e591f30)."""


MAX_AXES = 64
AXIS_NAME_FORM = "an identifier is: letters, digits, _ . -, no digit first"
_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True, slots=True)
class Rule:
    """A logical name and the mesh axes that shard a dim of that name, outer first.

    Raises:
        RulesError: a name that is not text, or axes that are no sequence of names.
    """

    name: str
    axes: tuple[str, ...]
    """Empty: such a dim stays whole, and later rules of the name never apply."""
    where: Where | None = None
    fault: str = ""
    """Why the target is invalid, where MaxText reports that only when it is used."""

    def __post_init__(self) -> None:
        form = "a rule has a logical name and a sequence of axis names, Rule('embed', ('fsdp', 'expert'))"
        if not isinstance(self.name, str):
            raise RulesError(f"{form}, got the name {brief(self.name)}")
        axes = items(self.axes, form, RulesError)
        if not all(isinstance(axis, str) for axis in axes):
            raise RulesError(f"{form}, got {brief(self.axes)}")
        object.__setattr__(self, "axes", axes)

    @property
    def repeated_axis(self) -> str | None:
        """An axis that the target names twice, which is invalid; else None."""
        return next((a for i, a in enumerate(self.axes) if a in self.axes[:i]), None)

    @property
    def entry(self) -> str | tuple[str, ...] | None:
        """The spec entry it gives: None, one name, or names (outer first)."""
        return self.axes if len(self.axes) > 1 else self.axes[0] if self.axes else None

    def __str__(self) -> str:
        more = f", ... {len(self.axes)} axes" if len(self.axes) > 16 else ""
        return f"[{self.name}, [{', '.join(self.axes[:16])}{more}]]"


def rules_error(
    text: str, where: Where | None = None, *, rule: Rule | str | None = None, axis: str | None = None
) -> RulesError:
    """Return an error that starts with the place: the given one, or the rule's."""
    if where is None and isinstance(rule, Rule):
        where = rule.where
    place = f"{where}: " if where else ""
    named = f"rule {rule}: " if rule is not None else ""
    return RulesError(
        f"{place}{named}{text}",
        path=where.path if where else None,
        line=where.line if where else None,
        column=where.column if where else None,
        rule=None if rule is None else str(rule),
        axis=axis,
    )


def read_map(node: Node) -> dict[str, tuple[Node, Node]]:
    """Return a map's entries by key: (key node, value node)."""
    entries: dict[str, tuple[Node, Node]] = {}
    for key, value in node.pairs:
        if key.kind in ("list", "map"):
            raise rules_error(f"a key is a word, got {key}", key.where)
        if key.text in entries:
            raise rules_error(
                f"the key {quoted(key.text)} stands twice, before at {entries[key.text][0].where}", key.where
            )
        entries[key.text] = (key, value)
    return entries


def is_axis_name(name: str) -> bool:
    """Return whether the name is valid for a mesh axis."""
    return _AXIS_NAME.match(name) is not None


def as_rules(given: object) -> tuple[Rule, ...]:
    """Return rules given as such or as pairs, or raise RulesError."""
    listed = items(given, "rules are a sequence of pairs (logical name, axis | axes | None)", RulesError)
    return tuple(r if isinstance(r, Rule) else as_rule(r) for r in listed)


def as_rule(pair: tuple[str, object]) -> Rule:
    """Return the rule of a (logical name, axis | axes | None) pair."""
    form = "a rule is a pair (logical name, axis | axes | None), such as ('embed', ['fsdp', 'expert'])"
    if (
        isinstance(pair, str)
        or not isinstance(pair, Sequence)
        or len(pair) != 2
        or not isinstance(pair[0], str)
    ):
        raise RulesError(f"{form}, got {quoted(pair)}")
    name, target = pair
    axes = () if target is None else (target,) if isinstance(target, str) else target
    if not isinstance(axes, Sequence) or not all(isinstance(a, str) and a for a in axes):
        raise RulesError(f"{form}, got {quoted(pair)}", rule=str(pair))
    return Rule(name, tuple(axes))
