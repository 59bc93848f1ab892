"""Composition before inheritance: no chain of more than two classes of ours, read from the whole tree."""

from __future__ import annotations

import ast
from pathlib import Path

from support.sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lowshard", "kernels", "launch", "bench")
MOST = 2
# Users catch errors by what they have in common: LowshardError, what it is about, which of them.
TAXONOMY = {"LowshardError"}


def bases() -> dict[str, list[str]]:
    """Return the names of the bases of every class, by its own name; those of classes of one name are joined."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    names = [_name(base) for base in node.bases]
                    found.setdefault(node.name, []).extend(name for name in names if name != node.name)
    return found


def _name(base: ast.expr) -> str:
    while isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def chain(name: str, known: dict[str, list[str]]) -> list[str]:
    """Return the longest chain of classes of ours that ends in a class, itself last."""
    above = [chain(base, known) for base in known[name] if base in known]
    return [*max(above, key=len, default=[]), name]


def test_no_chain_of_classes_is_longer_than_two() -> None:
    known = bases()
    assert len(known) > 300
    long = [found for name in known if len(found := chain(name, known)) > MOST and found[0] not in TAXONOMY]
    assert not long, "\n".join(" <- ".join(found) for found in long)
