"""The syntax trees of lowshard's own files, which several tests look through: each is read once a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

__all__ = ["tree_of"]


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file; nobody changes it.

    All trees together are 700,000 objects that stay: collections of garbage are spared them, now and later.
    """
    text = path.read_text(encoding="utf-8")
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
        gc.freeze()
