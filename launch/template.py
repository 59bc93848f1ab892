"""Job scripts and hostfiles to start from: `lowshard run --template NAME` prints one."""

from __future__ import annotations

from importlib import resources

from lowshard.errors import LaunchError
from lowshard.nearest import nearest

__all__ = ["template_list", "template_names", "template_text"]

_PACKAGE = "lowshard.launch"
_FOLDER = "templates"


def template_names() -> list[str]:
    """Returns the names of the templates, sorted."""
    folder = resources.files(_PACKAGE) / _FOLDER
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file())


def template_text(name: str) -> str:
    """Returns a template.

    Raises:
        LaunchError: there is none of this name.
    """
    if name not in template_names():
        raise LaunchError(
            f"the templates are {', '.join(template_names())}; got {name!r}{nearest(name, template_names())}"
        )
    return (resources.files(_PACKAGE) / _FOLDER / name).read_text(encoding="utf-8")


def template_list() -> str:
    """Returns one line for each template: its name, and what its first comment says."""
    width = max(map(len, template_names()))
    lines = []
    for name in template_names():
        comments = [
            line.lstrip("# ")
            for line in template_text(name).splitlines()
            if line.startswith("# ") and line[2:]
        ]
        lines.append(f"{name:{width}}  {comments[0]}\n")
    return "".join(lines)
