"""The nearest of the names that there are, for errors about one that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_MOST_NAMES, _MOST_CHARACTERS = 2000, 200
"""Of those compared: comparing takes time that grows with both."""
_OTHER_WORDS = {"gpu": "cuda", "mean": "avg", "average": "avg", "add": "sum", "product": "prod"}
"""What people write, and the name that there is, where letters do not tell."""


def nearest(
    name: object, known: Iterable[str], most: int = 3, alike: float = 0.6, before: str = ""
) -> str:  # fmt: skip
    """Return "; did you mean a, b?" with the nearest of some names, or nothing where none is near."""
    if not isinstance(name, str):
        return ""
    import difflib

    asked = name[:_MOST_CHARACTERS]
    names = dict.fromkeys(
        k for k in islice(known, _MOST_NAMES) if len(k) <= 2 * _MOST_CHARACTERS and k.isprintable()
    )
    other = _OTHER_WORDS.get(asked.casefold())
    found = [other] if other in names else difflib.get_close_matches(asked, names, most, alike)
    if not found:  # another case is no other name to people, and it is to difflib
        folded = {k.casefold(): k for k in names}
        found = [folded[k] for k in difflib.get_close_matches(asked.casefold(), folded, most, alike)]
    return f"; did you mean {', '.join(before + name for name in found)}?" if found else ""
