"""What the site is made from beside its pages: the package as it installs, the settings, and each command's help."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("kernels", "launch", "bench")  # these folders of the checkout install as lowshard.kernels and so on
_tree: tempfile.TemporaryDirectory[str] | None = None


@event_priority(100)  # before mkdocstrings reads its own part of the configuration
def on_config(config: Any) -> Any:
    """Show mkdocstrings a folder in which the package lies as it is imported; it reads sources and imports nothing."""
    global _tree
    if _tree is None:
        _tree = tempfile.TemporaryDirectory(prefix="lowshard-docs-")
        package = Path(_tree.name) / "lowshard"
        package.mkdir()
        for path in (ROOT / "lowshard").iterdir():
            (package / path.name).symlink_to(path)
        for name in BESIDE:
            (package / name).symlink_to(ROOT / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_tree.name]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add examples/: its list as a page, and the programs as files that the list links to."""
    for path in sorted((ROOT / "examples").glob("*")):
        if path.name == "README.md":
            files.append(File.generated(config, "examples/index.md", abs_src_path=str(path)))
        elif path.suffix == ".py":
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables that the package has, and the help of commands, where a page asks for them."""
    markdown = markdown.replace("<!-- the table of settings -->", settings_table())
    markdown = markdown.replace("<!-- the table of collectives -->", collectives_table())
    return markdown.replace("<!-- the help of every command -->", "\n".join(helps()))


def settings_table() -> str:
    """Return every variable with its values, its default and its meaning, as a table."""
    from lowshard.settings import SETTINGS

    rows = ["| variable | values | default | what it does |", "|---|---|---|---|"]
    for setting in SETTINGS:
        values = ", ".join(
            f"`{value}`" if "|" in setting.values else value for value in setting.values.split("|")
        )
        default = f"`{setting.default}`" if setting.default else "not set"
        rows.append(f"| `{setting.name}` | {values} | {default} | {setting.meaning} |")
    return "\n".join(rows)


def collectives_table() -> str:
    """Return every collective with what it does, as a table."""
    from lowshard.comm import Communicator
    from lowshard.comm.collectives import COLLECTIVES

    rows = ["| collective | what it does |", "|---|---|"]
    for name in COLLECTIVES:
        said = (getattr(Communicator, name).__doc__ or "").partition("\n")[0]
        rows.append(f"| `{name}` | {said} |")
    return "\n".join(rows)


def helps() -> Iterator[str]:
    """Yield a section for each command: what `lowshard COMMAND --help` prints."""
    from lowshard.cli import main
    from lowshard.settings import change

    def help_of(*words: str) -> str:
        out = io.StringIO()
        with redirect_stdout(out), suppress(SystemExit):
            main([*words, "--help"])
        return out.getvalue().rstrip()

    change("COLUMNS", "100")  # argparse asks for the width of a terminal
    for name in commands(help_of()):
        yield f"## lowshard {name}\n\n```text\n{help_of(name)}\n```\n"
        if name in ("bench", "rules"):
            for sub in commands(help_of(name)):
                yield f"### lowshard {name} {sub}\n\n```text\n{help_of(name, sub)}\n```\n"


def commands(text: str) -> list[str]:
    """Return the commands that a help text lists."""
    listed = re.split(r"^(?:commands|benchmarks):$", text, flags=re.MULTILINE)[1]
    return re.findall(r"^    (\w+)(?: |$)", listed, re.MULTILINE)
