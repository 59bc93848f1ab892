"""Every file in examples/ runs by the command in its docstring and prints what its docstring says."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_S = 100.0
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Example:
    """What the docstring of an example says.

    Attributes:
        shows: its first line.
        command: the first indented line: how it is run, from the repository's root.
        output: the indented block below a line that begins with "Output"; "..." stands for anything.
    """

    shows: str
    command: str
    output: str

    @classmethod
    def of(cls, file: Path) -> Example:
        """Read it off a file."""
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        blocks = re.findall(r"(?:^    .*\n|^\n)+", text + "\n", re.MULTILINE)
        indented = [textwrap.dedent(block).strip("\n") + "\n" for block in blocks if block.strip()]
        assert len(indented) >= 2, f"{file.name}: a docstring with an indented command and an indented output"
        assert re.search(r"^Output.*:\n\n    ", text, re.MULTILINE), (
            f"{file.name}: a line 'Output of rank 0:'"
        )
        return cls(text.splitlines()[0], indented[0].strip(), indented[-1])


def test_there_are_twelve_examples_or_more_and_a_list_of_all() -> None:
    assert len(FILES) >= 12
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for file in FILES:
        assert f"[{file.name}]({file.name})" in listed, f"examples/README.md does not list {file.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_says_in_its_first_lines_what_it_shows_and_its_command(file: Path) -> None:
    example = Example.of(file)
    assert example.shows.endswith((".", ":"))
    words = shlex.split(example.command)
    path = f"examples/{file.name}"
    if words[0] == "lowshard":
        assert words[:3] == ["lowshard", "run", "-n"]
        assert 2 <= int(words[3]) <= 4
        assert words[4:] == [path]
    else:
        assert words == ["python", path]


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_runs_by_its_command_and_prints_what_it_says(file: Path, tmp_path: Path) -> None:
    example = Example.of(file)
    for name in _libraries_of(file):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{file.name} needs {name}: pip install {name}")
    words = shlex.split(example.command)
    words = [sys.executable, *(["-m", "lowshard"] if words[0] == "lowshard" else []), *words[1:]]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    shown = "".join(line.removeprefix("[0] ") for line in ran.stdout.splitlines(keepends=True))
    check = doctest.OutputChecker()
    assert check.check_output(example.output, shown, _FLAGS), check.output_difference(
        doctest.Example("", example.output), shown, doctest.REPORT_NDIFF
    )
    assert [left.name for left in tmp_path.iterdir() if left.name.startswith("lowshard-example")] == []


def _libraries_of(file: Path) -> set[str]:
    """Return the libraries an example imports that lowshard itself does not need."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    optional = {"torch", "jax", "flax", "optax", "cupy"}
    return {name.split(".")[0] for name in names} & optional
