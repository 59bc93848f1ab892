"""Every file in examples/ runs by the command in its docstring and prints what its docstring says."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

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


def check_output(example: Example, shown: str) -> None:
    check = doctest.OutputChecker()
    assert check.check_output(example.output, shown, _FLAGS), check.output_difference(
        doctest.Example("", example.output), shown, doctest.REPORT_NDIFF
    )


def libraries_of(file: Path) -> set[str]:
    """Return the libraries an example imports that lowshard itself does not need."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names} & {"torch", "jax", "flax", "optax", "cupy"}


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("lowshard-example")]


TOGETHER = {file: int(Example.of(file).command.split()[3]) for file in FILES
            if Example.of(file).command.startswith("lowshard run") and not libraries_of(file)}  # fmt: skip
"""Examples on ranks, and how many: a default run starts one job for those of a number."""
APART = [file for file in FILES if file not in TOGETHER]
RUNNING = [file for file in APART if not any(importlib.util.find_spec(n) is None for n in libraries_of(file))]
BY_COMMAND = [
    *mode.sample([*TOGETHER], 1, "examples by command"),
    *(APART if mode.full() else mode.sample(RUNNING, 1, "examples apart")),
]
"""Examples that are started as their docstrings say; .ci/run has all of them."""


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", mode.sample(sorted(set(TOGETHER.values())), 1, "ranks of examples"))
@pytest.mark.full_only
def test_examples_on_ranks_print_what_they_say(ranks: int, tmp_path: Path) -> None:
    files = [str(file) for file, number in TOGETHER.items() if number == ranks]
    target = Path(__file__).with_name("run_examples.py")
    out = tmp_path / "printed.json"
    start_ranks(target, ranks, [str(out), *files], LIMIT_S, env={"TMPDIR": str(tmp_path)}).ok()
    printed = json.loads(out.read_text(encoding="utf-8"))
    assert list(printed) == files
    for file, shown in printed.items():
        check_output(Example.of(Path(file)), shown)
    assert left_in(tmp_path) == []


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("file", BY_COMMAND, ids=lambda file: file.stem)
def test_an_example_runs_by_its_command_and_prints_what_it_says(file: Path, tmp_path: Path) -> None:
    example = Example.of(file)
    for name in libraries_of(file):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{file.name} needs {name}: pip install {name}")
    words = shlex.split(example.command)
    words = [sys.executable, *(["-m", "lowshard"] if words[0] == "lowshard" else []), *words[1:]]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_output(example, "".join(line.removeprefix("[0] ") for line in ran.stdout.splitlines(keepends=True)))
    assert left_in(tmp_path) == []
