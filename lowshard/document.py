"""YAML text to a tree of nodes that know their place, with bounds on everything a file can ask for.

PyYAML's own composer recurses (deep nesting ends in RecursionError) and its constructor expands
aliases, turns long digit strings into numbers and calls what tags name. Here its events are read one
by one and nothing is constructed: a scalar keeps its text and the kind that YAML 1.1 gives it. `plain_data` makes
lists, dicts and scalars of such a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from lowshard.argument import brief
from lowshard.errors import DependencyError, LowshardError

if TYPE_CHECKING:
    from yaml.events import Event

Kind = Literal["text", "null", "bool", "int", "float", "other", "list", "map"]

MAX_FILE_BYTES = 8_000_000
MAX_DEPTH = 32
MAX_WORD = 1000
"""Characters of a name, a pattern or a number."""
MAX_NODES = 50_000
"""Nodes of a file with every alias written out."""

_TAG = "tag:yaml.org,2002:"
_KINDS: Mapping[str, Kind] = {"str": "text", "null": "null", "bool": "bool", "int": "int", "float": "float"}
_MERGE = "<<"
_TRUE, _FALSE = ("yes", "true", "on"), ("no", "false", "off")
"""Truth values of YAML 1.1 as PyYAML reads them, in small letters."""


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


class _Fault(Exception):
    def __init__(self, text: str, where: Where) -> None:
        self.text, self.where = text, where


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A scalar, list or map of a YAML file."""

    kind: Kind
    where: Where
    text: str = ""
    """A scalar as written, without quotes."""
    items: tuple[Node, ...] = ()
    """The items of a list."""
    pairs: tuple[tuple[Node, Node], ...] = ()
    """The entries of a map, in file order."""
    nodes: int = 1
    """Nodes of the tree below and including it, aliases written out."""

    @property
    def is_true(self) -> bool:
        """Whether a truth value says true."""
        return self.text.lower() in _TRUE

    def __str__(self) -> str:
        text = self.text
        if self.kind == "list":
            text = f"[{', '.join(str(i) for i in self.items[:12])}{', ...' if len(self.items) > 12 else ''}]"
        elif self.kind == "map":
            inner = ", ".join(f"{k}: {v}" for k, v in self.pairs[:6])
            text = f"{{{inner}{', ...' if len(self.pairs) > 6 else ''}}}"
        return text if len(text) <= 160 else f"{text[:140]}..."


@dataclass(slots=True)
class _Open:
    """A list or map whose end has not come yet."""

    kind: Literal["list", "map"]
    where: Where
    anchor: str | None
    children: list[Node] = field(default_factory=list)
    nodes: int = 1


def parse_document(text: str, path: str, fail: Fail) -> Node | None:
    """Return the one document of a YAML text, or None where it is empty."""
    try:
        return _parsed(text, path)
    except _Fault as fault:
        raise fail(fault.text, fault.where) from fault.__cause__


def plain_data(node: Node | None, fail: Fail) -> Any:
    """Return a tree as lists, dicts with text for keys, and scalars; a file without a document is None."""
    if node is None or node.kind == "null":
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
    if node.kind == "text":
        return node.text
    if node.kind == "bool":
        return node.is_true
    if node.kind == "other":
        raise fail(f"{node} is neither text nor a number; put it in quotes", node.where)
    try:
        return number_of(node)
    # PyYAML raises LookupError for a number without digits.
    except (ArithmeticError, LookupError, ValueError) as error:
        raise fail(f"{node} cannot be read as a number; put it in quotes", node.where) from error


def number_of(node: Node) -> int | float:
    """Return the number that YAML 1.1 reads a scalar of kind int or float as."""
    from yaml.constructor import SafeConstructor
    from yaml.nodes import ScalarNode

    scalar = ScalarNode(_TAG + node.kind, node.text)
    made = SafeConstructor()
    return made.construct_yaml_int(scalar) if node.kind == "int" else made.construct_yaml_float(scalar)


def _parsed(text: str, path: str) -> Node | None:
    start = Where(path, 1, 1)
    if len(text) > MAX_FILE_BYTES:
        raise _Fault(f"a YAML file has at most {MAX_FILE_BYTES} characters, this has {len(text)}", start)
    found: Node | None = None
    stack: list[_Open] = []
    anchors: dict[str, Node | None] = {}
    total = 0
    for name, event in _events(text, path):
        where = _where(event, path)
        anchor = getattr(event, "anchor", None)
        node: Node | None = None
        if name == "DocumentStartEvent" and found is not None:
            raise _Fault("a YAML file is one YAML document, a second one starts here", where)
        if name in ("SequenceStartEvent", "MappingStartEvent"):
            if len(stack) >= MAX_DEPTH:
                raise _Fault(f"a YAML file nests at most {MAX_DEPTH} deep, this goes deeper", where)
            _check_tag(event, where, "seq" if name[0] == "S" else "map")
            stack.append(_Open("list" if name[0] == "S" else "map", where, anchor))
            if anchor:
                anchors[anchor] = None
        elif name == "ScalarEvent":
            if len(event.value) > MAX_WORD:  # type: ignore[attr-defined]
                raise _Fault(f"a word in a YAML file has at most {MAX_WORD} characters", where)
            node = Node(_scalar_kind(event, where), where, event.value)  # type: ignore[attr-defined]
        elif name == "AliasEvent":
            if anchors.get(str(anchor)) is None:
                what = "stands inside its own anchor" if anchor in anchors else "has no anchor before it"
                raise _Fault(f"the alias *{brief(anchor)[1:-1]} {what}", where)
            node, anchor = anchors[str(anchor)], None
        elif name in ("SequenceEndEvent", "MappingEndEvent"):
            done = stack.pop()
            anchor = done.anchor
            node = _close(done)
        if node is None:
            continue
        if anchor:
            anchors[anchor] = node
        total += 1 if node.kind in ("list", "map") and name != "AliasEvent" else node.nodes
        if total > MAX_NODES:
            raise _Fault(f"a YAML file has at most {MAX_NODES} nodes, aliases written out", where)
        if stack:
            stack[-1].children.append(node)
            stack[-1].nodes += node.nodes
        else:
            found = node
    return found


def _close(done: _Open) -> Node:
    if done.kind == "list":
        return Node("list", done.where, items=tuple(done.children), nodes=done.nodes)
    pairs = tuple(zip(done.children[::2], done.children[1::2], strict=True))
    node = Node("map", done.where, pairs=pairs, nodes=done.nodes)
    return _merged(node) if any(k.kind == "other" and k.text == _MERGE for k, _ in pairs) else node


def _merged(node: Node) -> Node:
    """Return a map with its merge keys (YAML 1.1 `<<`) resolved: own keys win, then the first named."""
    own = [(k, v) for k, v in node.pairs if k.text != _MERGE or k.kind != "other"]
    known = {k.text for k, _ in own}
    for key, value in node.pairs:
        if key.kind != "other" or key.text != _MERGE:
            continue
        sources = value.items if value.kind == "list" else (value,)
        for source in sources:
            if source.kind != "map":
                raise _Fault(f"<< takes a map or a list of maps, got {source}", value.where)
            for k, v in source.pairs:
                if k.text not in known:
                    known.add(k.text)
                    own.append((k, v))
    return Node("map", node.where, pairs=tuple(own), nodes=node.nodes)


def _events(text: str, path: str) -> Iterator[tuple[str, Event]]:
    try:
        import yaml
    except ImportError as error:
        raise DependencyError(
            "YAML files need PyYAML, a core dependency: pip install 'PyYAML>=6.0.2'"
        ) from error
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for event in yaml.parse(text, Loader=loader):
            yield type(event).__name__, event
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "damaged"
        where = Where(path, mark.line + 1, mark.column + 1) if mark is not None else Where(path, 1, 1)
        raise _Fault(f"this is not YAML: {what}", where) from error
    except (ValueError, RecursionError) as error:  # surrogates, which have no UTF-8 form
        raise _Fault(f"this is not YAML: {brief(str(error))}", Where(path, 1, 1)) from error


def _where(event: Event, path: str) -> Where:
    mark: Any = event.start_mark
    return Where(path, mark.line + 1, mark.column + 1)


def _check_tag(event: Any, where: Where, plain: str) -> None:
    if event.tag not in (None, "!", _TAG + plain):
        raise _Fault(f"the tag {brief(event.tag)} means nothing in a YAML file; leave it out", where)


def _scalar_kind(event: Any, where: Where) -> Kind:
    tag = event.tag
    if tag is None and event.implicit[0]:
        if len(event.value) > 200:  # no name is that long, and the number patterns need not see it
            return "text"
        tag = _resolver().resolve(_scalar_node(), event.value, (True, False))
    elif tag is None or tag == "!":
        return "text"
    if tag == f"{_TAG}bool" and event.value.lower() not in _TRUE + _FALSE:
        raise _Fault(f"a truth value is true or false, got {brief(event.value)}", where)
    if not tag.startswith(_TAG) or tag[len(_TAG) :] not in (*_KINDS, "timestamp", "merge", "value", "binary"):
        raise _Fault(f"the tag {brief(tag)} means nothing in a YAML file; leave it out", where)
    return _KINDS.get(tag[len(_TAG) :], "other")


@cache
def _resolver() -> Any:
    from yaml.resolver import Resolver

    return Resolver()


@cache
def _scalar_node() -> Any:
    from yaml.nodes import ScalarNode

    return ScalarNode
