"""YAML text to a tree of nodes that know their place, with bounds on everything a file can ask for.

PyYAML's loader (libyaml's where it is built in) composes and constructs; what it makes of a text is bounded while it
composes. `plain_data` makes lists, dicts and scalars of such a tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowshard.errors import DependencyError, LowshardError

Kind = Literal["text", "null", "bool", "int", "float", "other", "list", "map"]

MAX_FILE_BYTES = 8_000_000
MAX_DEPTH = 32
MAX_WORD = 1000
"""Characters of a name, a pattern or a number."""
MAX_NODES = 50_000
"""Nodes of a file with every alias written out."""

_MERGE = "tag:yaml.org,2002:merge"
_KINDS: Mapping[type, Kind] = {str: "text", type(None): "null", bool: "bool", int: "int", float: "float"}


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file; line and column count from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


Fail = Callable[[str, Where], LowshardError]
"""Makes the error that says a text, and the place that it is about."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A scalar, list or map of a YAML file."""

    kind: Kind
    where: Where
    text: str = ""
    """A scalar as written, without quotes."""
    value: Any = None
    """A scalar as YAML 1.1 reads it."""
    items: tuple[Node, ...] = ()
    """The items of a list."""
    pairs: tuple[tuple[Node, Node], ...] = ()
    """The entries of a map, in file order, after those that it merges (`<<`)."""

    def __str__(self) -> str:
        text = self.text
        if self.kind == "list":
            text = f"[{', '.join(str(i) for i in self.items[:12])}{', ...' if len(self.items) > 12 else ''}]"
        elif self.kind == "map":
            inner = ", ".join(f"{k}: {v}" for k, v in self.pairs[:6])
            text = f"{{{inner}{', ...' if len(self.pairs) > 6 else ''}}}"
        return text if len(text) <= 160 else f"{text[:140]}..."


def parse_document(text: str, path: str, fail: Fail) -> Node | None:
    """Return the one document of a YAML text, or None where it is empty."""
    if len(text) > MAX_FILE_BYTES:
        said = f"a YAML file has at most {MAX_FILE_BYTES} characters, this has {len(text)}"
        raise fail(said, Where(path, 1, 1))
    try:
        import yaml
    except ImportError as error:
        raise DependencyError(
            "YAML files need PyYAML, a core dependency: pip install 'PyYAML>=6.0.2'"
        ) from error
    try:
        loader = _loader(yaml, text)
        found = loader.get_single_node()
        return None if found is None else _node(found, path, loader, {})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        what = ", ".join(word for word in words if word)
        where = Where(path, mark.line + 1, mark.column + 1) if mark is not None else Where(path, 1, 1)
        raise fail(f"this is not YAML that lowshard reads: {what}", where) from error
    except ValueError as error:  # half a surrogate pair
        raise fail(f"this is not YAML: {str(error)[:200]}", Where(path, 1, 1)) from error


def plain_data(node: Node | None, fail: Fail) -> Any:
    """Return a tree as lists, dicts with text for keys, and scalars; a file without a document is None."""
    if node is None:
        return None
    if node.kind == "list":
        return [plain_data(item, fail) for item in node.items]
    if node.kind == "map":
        found: dict[str, Any] = {}
        for key, value in node.pairs:
            if key.kind != "text" or key.text in found:
                raise fail(
                    f"a key is text and stands once, got {key} ({key.kind}); put a name in quotes", key.where
                )
            found[key.text] = plain_data(value, fail)
        return found
    if node.kind == "other":
        raise fail(f"{node} is neither text nor a number; put it in quotes", node.where)
    return node.value


def place_of(node: Node, path: str) -> Where:
    """Return where the value at a path such as .mesh.axes[2] stands; where there is none, the deepest above it."""
    for name, number in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        below: dict[Any, Node] = {k.text: v for k, v in node.pairs} if name else dict(enumerate(node.items))
        found = below.get(name or int(number))
        if found is None:
            break
        node = found
    return node.where


def _loader(yaml: Any, text: str) -> Any:
    """Return PyYAML's safe loader of a text, libyaml's where there is one, with our bounds on what it composes."""
    fast = getattr(yaml, "CSafeLoader", None)
    plain = fast or yaml.SafeLoader

    class Bounded(*((yaml.composer.Composer, fast) if fast else (plain,))):  # type: ignore[misc]
        def __init__(self) -> None:
            plain.__init__(self, text)
            self.anchors: dict[str, Any] = {}
            self._depth = self._nodes = 0
            self._sizes: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event, before = self.peek_event(), self._nodes
            self._depth += 1
            self._nodes += 1
            if self._depth > MAX_DEPTH:
                refuse(f"it nests more than {MAX_DEPTH} deep", event)
            if len(getattr(event, "value", "")) > MAX_WORD:
                refuse(f"a word has at most {MAX_WORD} characters", event)
            node = super().compose_node(parent, index)
            if isinstance(event, yaml.AliasEvent):
                if id(node) not in self._sizes:
                    refuse(f"the alias *{event.anchor} stands inside its own anchor", event)
                self._nodes += self._sizes[id(node)]
            else:
                self._sizes[id(node)] = self._nodes - before
            if self._nodes > MAX_NODES:
                refuse(f"it has more than {MAX_NODES} nodes, aliases written out", event)
            self._depth -= 1
            return node

    def refuse(what: str, event: Any) -> None:
        raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)

    return Bounded()


def _node(given: Any, path: str, loader: Any, known: dict[int, Node]) -> Node:
    """Return a node of PyYAML's as ours; one that several aliases name is one of ours, too."""
    import yaml

    if id(given) in known:
        return known[id(given)]
    mark = given.start_mark
    where = Where(path, mark.line + 1, mark.column + 1)
    if isinstance(given, yaml.ScalarNode):
        try:
            value = loader.construct_object(given)
        except (ArithmeticError, LookupError, ValueError) as error:  # LookupError: a number without digits
            said = f"{given.value[:100]!r} cannot be read as what it looks like; put it in quotes"
            raise yaml.MarkedYAMLError(problem=said, problem_mark=mark) from error
        made = Node(_KINDS.get(type(value), "other"), where, given.value, value)
    elif given.tag not in (loader.DEFAULT_SEQUENCE_TAG, loader.DEFAULT_MAPPING_TAG):
        said = f"the tag {given.tag[:100]!r} means nothing here; leave it out"
        raise yaml.MarkedYAMLError(problem=said, problem_mark=mark)
    elif isinstance(given, yaml.SequenceNode):
        made = Node("list", where, items=tuple(_node(item, path, loader, known) for item in given.value))
    else:
        pairs = given.value
        if any(key.tag == _MERGE for key, _ in pairs):
            loader.flatten_mapping(given)
            pairs = {str(key.value): (key, value) for key, value in given.value}.values()
        made = Node(
            "map",
            where,
            pairs=tuple((_node(k, path, loader, known), _node(v, path, loader, known)) for k, v in pairs),
        )
    known[id(given)] = made
    return made
