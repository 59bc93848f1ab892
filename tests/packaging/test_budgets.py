"""What each package may weigh: one person has to be able to keep the house.

    pytest -s tests/packaging/test_budgets.py        prints the table

A budget is lowered in the commit that makes room. Raising one needs a line in CHANGELOG.md that says what left for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = {".py", ".pyi", ".cu", ".cuh", ".c", ".h", ".sh"}
TEXT_DATA = {".json", ".jsonl", ".yml", ".yaml", ".md", ".txt", ""}


@dataclass(frozen=True)
class Budget:
    """At most so many lines and files of code in some folders and modules."""

    lines: int
    files: int
    places: tuple[str, ...]


PRODUCT = {
    "floor 0": Budget(3_688, 31, (
        "lowshard/compiled", "lowshard/warmup",
        *(f"lowshard/{name}.py" for name in (
            "__init__", "__main__", "_version", "argument", "block_format", "bounded", "box",
            "command_line", "content_hash", "document", "dtypes", "errors",
            "foreign_array", "gpu_stream", "nearest", "plain_console", "reading", "settings",
        )),
    )),
    "kernels": Budget(9_574, 60, ("kernels",)),
    "mesh, placement, layout, tiling": Budget(1_214, 4, tuple(
        f"lowshard/{name}.py" for name in ("mesh", "placement", "layout", "tiling")
    )),
    "comm": Budget(10_500, 46, ("lowshard/comm",)),
    "cost, rules": Budget(3_593, 19, ("lowshard/cost.py", "lowshard/rules")),
    "redistribute plans, solver, op": Budget(8_552, 35, (
        *(f"lowshard/{name}.py" for name in ("redistribute_plan", "step_search", "step_cost", "exchange")),
        "lowshard/solver", "lowshard/op",
    )),
    "execute, pool, transfer": Budget(3_133, 15, ("lowshard/execute.py", "lowshard/pool.py", "lowshard/transfer")),
    "reshard": Budget(8_242, 30, ("lowshard/reshard",)),
    "weights, checkpoint": Budget(9_200, 31, ("lowshard/weights", "lowshard/checkpoint")),
    "fsdp": Budget(3_646, 16, ("lowshard/fsdp",)),
    "launch": Budget(2_671, 18, ("launch",)),
    "demo, selftest, interop, cli": Budget(3_704, 30, (
        "lowshard/demo", "lowshard/selftest", "lowshard/interop", "lowshard/cli.py",
    )),
}  # fmt: skip
PRODUCT_LINES, PRODUCT_BYTES, PRODUCT_FUNCTIONS = 67_696, 2_980_000, 4_300
BENCH = Budget(5_770, 26, ("bench",))
TESTS = Budget(50_000, 299, ("tests",))
TESTS_OF_COMM = Budget(5_100, 45, ("tests/comm", "tests/launch"))
TEST_DATA_LINES = 3_550
EXAMPLES = Budget(1_403, 18, ("examples", "docs"))
EXAMPLES_AND_BLOCKS_LINES = 1_900
"""With the blocks of Python in the pages."""


def files_of(*places: str) -> Iterator[Path]:
    """Each file of code below some folders, or a module itself."""
    for place in places:
        path = ROOT / place
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in found if one.suffix in CODE and one.is_file())


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def functions_of(path: Path) -> int:
    return (
        len(re.findall(r"^ *(?:async )?def ", path.read_text(), re.MULTILINE)) if path.suffix == ".py" else 0
    )


@dataclass(frozen=True)
class Weight:
    """What some files weigh together."""

    lines: int
    bytes: int
    files: int
    functions: int

    @classmethod
    def of(cls, paths: list[Path]) -> Weight:
        return cls(
            sum(map(lines_of, paths)),
            sum(path.stat().st_size for path in paths),
            len(paths),
            sum(map(functions_of, paths)),
        )


def weights() -> dict[str, tuple[Weight, Budget]]:
    data = ROOT / "tests" / "data"
    rows = {name: (Weight.of(list(files_of(*budget.places))), budget) for name, budget in PRODUCT.items()}
    rows["bench"] = Weight.of(list(files_of(*BENCH.places))), BENCH
    tests = [path for path in files_of(*TESTS.places) if data not in path.parents]
    rows["tests"] = Weight.of(tests), TESTS
    rows["tests of comm and launch"] = Weight.of(list(files_of(*TESTS_OF_COMM.places))), TESTS_OF_COMM
    rows["examples, Python in docs"] = Weight.of(list(files_of(*EXAMPLES.places))), EXAMPLES
    return rows


def table(rows: dict[str, tuple[Weight, Budget]]) -> str:
    lines = [f"{'':37}{'lines':>8}{'budget':>8}{'bytes':>11}{'files':>7}{'most':>6}{'functions':>11}"]
    for name, (is_, most) in rows.items():
        lines.append(
            f"{name:37}{is_.lines:8,}{most.lines:8,}{is_.bytes:11,}{is_.files:7}{most.files:6}{is_.functions:11,}"
        )
    return "\n".join(lines)


def test_each_package_keeps_to_its_budget() -> None:
    rows = weights()
    whole = Weight.of([path for budget in PRODUCT.values() for path in files_of(*budget.places)])
    said = table(rows)
    print(f"\n{said}\n{'lowshard + kernels + launch':37}{whole.lines:8,}{PRODUCT_LINES:8,}{whole.bytes:11,}")
    over = [name for name, (is_, most) in rows.items() if is_.lines > most.lines or is_.files > most.files]
    assert not over, f"over budget: {', '.join(over)}\n{said}"
    assert whole.lines <= PRODUCT_LINES
    assert whole.bytes <= PRODUCT_BYTES
    assert whole.functions <= PRODUCT_FUNCTIONS


def test_no_module_stands_outside_the_table() -> None:
    counted = {path for budget in PRODUCT.values() for path in files_of(*budget.places)}
    assert set(files_of("lowshard", "kernels", "launch")) == counted


def test_the_data_of_the_tests_keeps_to_its_budget() -> None:
    paths = [
        path for path in (ROOT / "tests" / "data").rglob("*") if path.is_file() and path.suffix in TEXT_DATA
    ]
    lines = sum(map(lines_of, paths))
    print(f"\n{'data of the tests':37}{lines:8,}{TEST_DATA_LINES:8,}")
    assert lines <= TEST_DATA_LINES


def test_the_programs_that_people_read_keep_to_their_budget() -> None:
    blocks = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^ *```python.*?\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
            blocks += block.count("\n")
    lines = Weight.of(list(files_of(*EXAMPLES.places))).lines + blocks
    print(f"\n{'examples, Python in docs, its blocks':37}{lines:8,}{EXAMPLES_AND_BLOCKS_LINES:8,}")
    assert lines <= EXAMPLES_AND_BLOCKS_LINES


@pytest.mark.parametrize("name", sorted(PRODUCT))
def test_every_row_names_files_that_are_there(name: str) -> None:
    for place in PRODUCT[name].places:
        assert (ROOT / place).exists(), f"{place} of the row {name!r} is gone: take it out of the table"
