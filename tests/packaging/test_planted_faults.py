"""Faults planted in a copy of the tree, one in each part, are found by the tests of a default run.

    pytest --full -s tests/packaging/test_planted_faults.py

A fault whose text is not there any more has to be planted elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full_only, pytest.mark.time_limit(400)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lowshard", "kernels", "launch", "bench")
LIMIT_S = 360.0


@dataclass(frozen=True)
class Fault:
    """A mistake somebody may make.

    Attributes:
        part: where it is.
        right: a text of one file.
        wrong: what is written in its place.
        tests: the files of tests that look at that part, as a default run has them.
    """

    part: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(  # a tie goes up, to an odd code too
        "kernels",
        "40)\n        rounded = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift",
        "40)\n        rounded = (significand + (1 << (shift - 1))) >> shift",
        ("unit/test_mxfp8.py",),
    ),
    Fault(  # the last element behind a hole is lost
        "geometry",
        "        if high < stop:\n            rest.append(",
        "        if high + 1 < stop:\n            rest.append(",
        ("unit/test_tiling.py", "unit/test_layout.py"),
    ),
    Fault(  # terms of a sum are taken for those of a maximum
        "plan",
        "zip(src.partials, dst.partials, strict=True)) if p is not None and p != q",
        "zip(src.partials, dst.partials, strict=True)) if p is not None and q is None",
        ("unit/test_path.py", "world/test_redistribute.py"),
    ),
    Fault(  # what is folded along one axis and cut along another passes for a reduce-scatter
        "names of steps",
        'return ("reduce_scatter", folded) if set(taken) == set(folded) else ("exchange", ())',
        'return ("reduce_scatter", folded)',
        ("unit/test_path.py",),
    ),
    Fault(  # a slab is laid over the one that others read
        "transfer",
        "key, local, stage[(number & 1) * half :])",
        "key, local, stage)",
        ("world/test_redistribute.py",),
    ),
    Fault(  # another tree of sums
        "comm", "half = (len(terms) + 1) // 2", "half = len(terms) // 2", ("comm/test_loopback.py",)
    ),
    Fault(  # a connection that closes without a farewell is no death
        "failure channel",
        'if rank not in self.gone:\n            self.fail(rank, "died"',
        'if rank in self.gone:\n            self.fail(rank, "died"',
        ("comm/test_channel.py",),
    ),
    Fault(  # a short message of another length is written to the buffer
        "messages",
        "came_bytes == buf.nbytes <= SHORT_BYTES",
        "came_bytes <= SHORT_BYTES",
        ("comm/test_ranks.py",),
    ),
    Fault(  # a rename that was refused passes for one that may have happened
        "checkpoint",
        "            if self._in_place() is False:\n                raise\n",
        "",
        ("world/test_save_steps.py", "world/test_checkpoint_writer.py"),
    ),
    Fault(  # a rule is left out only if all its axes are taken
        "rules",
        "if not holders.keys().isdisjoint(rule.axes):",
        "if rule.axes and holders.keys() >= set(rule.axes):",
        ("unit/test_rules_resolution.py", "unit/test_rules_golden.py"),
    ),
    Fault(  # an all-to-all is priced as an all-gather
        "solver",
        'return ring / size if collective == "all_to_all" and prices == "volume" else ring',
        "return ring",
        ("unit/test_solver.py", "unit/test_graph_solver.py"),
    ),
    Fault(  # blocks are summed in another tree
        "fsdp",
        "lanes = ((part[:, 0] + part[:, 1]) + part[:, 2]) + part[:, 3]",
        "lanes = (part[:, 0] + part[:, 1]) + (part[:, 2] + part[:, 3])",
        ("unit/test_fsdp_plan.py", "world/test_fsdp_bits.py"),
    ),
]


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what a clone has."""
    copy = folder / "tree"
    for name in (*PACKAGES, "tests", "pyproject.toml", "setup.cfg", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, copy / name)
    return copy


def plant(fault: Fault, tree: Path) -> Path:
    """Change the one file that has the text; return it."""
    files = [
        path
        for top in PACKAGES
        for path in (tree / top).rglob("*.py")
        if fault.right in path.read_text("utf-8")
    ]
    assert len(files) == 1, f"{fault.part}: {len(files)} files have {fault.right!r}: plant another fault"
    text = files[0].read_text("utf-8")
    assert text.count(fault.right) == 1
    files[0].write_text(text.replace(fault.right, fault.wrong), "utf-8")
    return files[0].relative_to(tree)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.part)
def test_a_planted_fault_is_found_by_a_default_run(fault: Fault, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    where = plant(fault, tree)
    env = {name: text for name, text in os.environ.items() if not name.startswith("LOWSHARD_TESTS")}
    env["PYTHONPATH"] = str(tree)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in fault.tests)],
        cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = re.search(r"^FAILED (.*)$", done.stdout, re.M)
    print(f"\n{fault.part} ({where}): {found[1][:150] if found else 'NOT FOUND'}")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
    assert found, done.stdout[-3000:]
