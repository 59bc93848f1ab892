"""Reads the code blocks of README and docs, runs them, and compares what they print with what the page shows.

What a page may hold (CONTRIBUTING.md says the same to its writers):

- `python`: a whole program. Its first line is a comment with its command: `# lowshard run -n 4 move.py` or
  `# python move.py`; what follows two spaces is for readers. It is written to that file and run. `# move.py` alone
  writes the file, for a command below.
- `{.python}`: includes a file of examples/, which has a test of its own.
- `text`, right after a program: what the program prints.
- `console`: lines that begin with `$ ` are commands, the lines below each are what it prints.
- `yaml` or `json` with `title="NAME"`: a file, written before what follows runs.

Any other block, such as `sh`, is not run, and says why in a comment right before it: `<!-- not run: WHY -->`.

In what is printed `...` stands for any text within a line, and a line of it alone for any number of lines. The lines of
ranks are compared in the order of ranks. Before a block `<!-- slow -->` leaves it to `pytest --full`, and
`<!-- needs: torch -->` to environments with that library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
_COMMAND = re.compile(r"# ((?:lowshard run(?: -\S+(?: \d+)?)+|python) (\w+\.py)(?: \S+)*)(?:  .*)?")
_FILE = re.compile(r"# (\w+\.py)")
_RANK = re.compile(r"\[(\d+)\] ")
_PROGRESS = re.compile(
    r"^lowshard [a-z ]+: (?:solving \d+ ops .*|resolving|checking|comparing checksums"
    r"|running on \d+ ranks|[^:\n]+ to (?:\w+=\S+|a new version|whole tensors))\n",
    re.MULTILINE,
)
"""What commands print where they take more than two seconds: a busy machine is no other page."""
_SNIPPET = re.compile(r'--8<-- "([^"]+)"\n')


@dataclass(frozen=True)
class Block:
    """One code block of a page.

    Attributes:
        line: where it begins in the page, from 1.
        language: the first word behind the fence.
        title: the file's name, where the fence gives one.
        text: what it holds.
        included: the file whose text stands there, or "".
        remark: the comment right before it, or "".
    """

    line: int
    language: str
    title: str
    text: str
    included: str
    remark: str


@dataclass(frozen=True)
class Step:
    """A command of a page: its line, the file to write before it, and what it shall print."""

    line: int
    command: str
    file: tuple[str, str] | None
    shown: str
    remark: str

    @property
    def slow(self) -> bool:
        """Whether it is left to `pytest --full`."""
        return self.remark == "slow"

    @property
    def missing(self) -> str:
        """The library that it needs and that is not installed, or ""."""
        _, _, needed = self.remark.partition("needs: ")
        return needed if needed and find_spec(needed) is None else ""


def pages() -> list[Path]:
    """Return README.md and every page of docs/, as paths from the root."""
    return [Path("README.md"), *sorted(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """Return the code blocks of a page."""
    found, remark = [], ""
    for token in MarkdownIt().parse(text):
        if token.type == "html_block":
            told = re.fullmatch(r"<!-- (.*?) -->\s*", token.content, re.DOTALL)
            remark = told.group(1) if told else ""
        elif token.type == "fence":
            assert token.map is not None
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            include = _SNIPPET.fullmatch(token.content)
            included = include.group(1) if include else ""
            name = title.group(1) if title else ""
            found.append(Block(token.map[0] + 1, language, name, token.content, included, remark))
            remark = ""
        elif token.nesting != -1:
            remark = ""
    return found


def steps(text: str) -> Iterator[Step]:
    """Yield the commands of a page in order.

    Raises:
        AssertionError: a block that is none of the kinds above.
    """
    pending = blocks(text)
    while pending:
        block = pending.pop(0)
        where = f"line {block.line}"
        remark = block.remark
        if remark.startswith("not run: "):
            continue
        match block.language:
            case "{.python}":
                assert block.included.startswith("examples/"), f"{where}: {{.python}} includes an example"
                assert (ROOT / block.included).is_file(), f"{where}: there is no {block.included}"
            case "python":
                first = block.text.partition("\n")[0]
                told = _COMMAND.fullmatch(first) or _FILE.fullmatch(first)
                assert told, f"{where}: the first line of a program is a comment with its command"
                if told.re is _FILE:
                    yield Step(block.line, ":", (told.group(1), block.text), "", remark)
                    continue
                follows = bool(pending) and pending[0].language == "text"
                shown = pending.pop(0).text if follows else ""
                yield Step(block.line, told.group(1), (told.group(2), block.text), shown, remark)
            case "console":
                parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
                assert not parts[0], f"{where}: a console block begins with `$ ` and a command"
                for part in parts[1:]:
                    command, _, shown = part.partition("\n")
                    yield Step(block.line, command, None, shown, remark)
            case "yaml" | "json":
                assert block.title, f"{where}: a file has a title, its name"
                yield Step(block.line, ":", (block.title, block.text), "", remark)
            case _:
                raise AssertionError(f"{where}: a block of {block.language or 'no language'}")


def run(step: Step, folder: Path) -> str:
    """Run a command in a page's folder; return what it prints.

    Raises:
        AssertionError: it fails.
    """
    if step.file is not None:
        (folder / step.file[0]).write_text(step.file[1], encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100", "PYTHONWARNINGS": "default"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S * (10 if step.slow else 1),
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}"
    return ran.stdout


def fits(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed."""
    if _RANK.match(shown):
        printed = in_rank_order(printed)
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*".join(re.escape(piece) for piece in line.rstrip().split("...")) + r"[ \t]*\n"
    printed = printed if printed.endswith("\n") or not printed else printed + "\n"
    return any(re.fullmatch(pattern, text) for text in (printed, _PROGRESS.sub("", printed)))


def in_rank_order(printed: str) -> str:
    """Return the lines of rank 0, then those of rank 1 and so on, then the launcher's own."""

    def key(line: str) -> float:
        told = _RANK.match(line)
        return int(told.group(1)) if told else float("inf")

    return "".join(sorted(printed.splitlines(keepends=True), key=key))
