"""Code that came compiled with the package: for whom it is, what of it is used, and how it is made."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mode
from support.other_user import as_root, as_user

pytest.importorskip("numba", reason="Numba is not installed")

from lowshard.compiled import shipped
from lowshard.compiled.elf import symbols_of
from lowshard.compiled.shipped import LEVELS, best_level, host_level, levels_here
from lowshard.warmup import ship_objects
from lowshard.warmup.compile_jobs import _environment

ROOT = Path(__file__).resolve().parents[2]
OTHER = 65534

# Loads a function where a package would have code in the folder given first; with a level, compiles it for that.
PROGRAM = """
import sys
from pathlib import Path
from lowshard.compiled import INT, Signature, load_compiled, origins, shipped
from lowshard.compiled.cache import compile_for
folder, level, name = sys.argv[1:]
shipped.folder = lambda: Path(folder)
if level:
    compile_for(next(one for one in shipped.LEVELS if one.name == level))
def plus_one(x):
    return x + 1
call = load_compiled(name, lambda: plus_one, Signature((INT,)))
print(call(41) if not level else "made", origins[name], "numba" in sys.modules)
"""

pytestmark = pytest.mark.skipif(
    host_level() is None, reason="this processor is of no level in shipped.LEVELS"
)


def ran(
    cache: Path, folder: Path, level: str = "", name: str = "plus_one", user: int | None = None, **more: str
) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LOWSHARD_"))}
    if level:
        env = _environment(next(one for one in LEVELS if one.name == level))
    env |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), "HOME": "/", **more}
    command = [*([] if user is None else as_user(user)), sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(
        [*command, str(folder), level, name],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package's folder with the program's function for this processor's level."""
    cache, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("package") / "objects"
    level = host_level()
    assert level is not None
    assert ran(cache, folder, level.name) == "made compiled True"
    (path,) = cache.rglob("plus_one.o")
    (folder / level.name).mkdir(parents=True)
    shutil.copyfile(path, folder / level.name / path.name)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "objects"))


def test_it_is_used_without_numba_and_nothing_is_kept(made: Path, tmp_path: Path) -> None:
    assert ran(tmp_path / "cache", made) == "42 shipped False"
    assert not list(tmp_path.rglob("*.o"))


OTHERS: list[dict[str, str]] = [{"name": "plus_1"}, {"NUMBA_OPT": "1"}]


@pytest.mark.parametrize("other", mode.sample(OTHERS, 1, "what is compiled"), ids=str)
def test_another_name_or_another_setting_is_compiled(
    made: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    """A name has a digest of the source in it: code of other source has another."""
    assert ran(tmp_path, made, **other) == "42 compiled True"


@pytest.mark.full_only
def test_what_was_compiled_while_it_was_off_comes_first(made: Path, tmp_path: Path) -> None:
    assert ran(tmp_path, made, LOWSHARD_SHIPPED_CODE="off") == "42 compiled True"
    assert ran(tmp_path, made) == "42 disk False"


def test_what_is_compiled_here_is_the_code_that_a_build_makes(made: Path, tmp_path: Path) -> None:
    assert ran(tmp_path, made, LOWSHARD_SHIPPED_CODE="off") == "42 compiled True"
    (here,), (there,) = tmp_path.rglob("*.o"), made.rglob("*.o")
    assert here.read_bytes() == there.read_bytes()


NUMBA_FIRST = """
from numba import njit
njit(lambda x: x)(1)
"""


@pytest.mark.full_only
def test_where_numba_was_used_before_for_this_very_processor_nothing_is_kept(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", NUMBA_FIRST + PROGRAM)
    assert ran(tmp_path, made, LOWSHARD_SHIPPED_CODE="off") == "42 memory True"
    assert not list(tmp_path.rglob("*.o"))


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:99] + b"!" + path.read_bytes()[100:]),
    "writable by others": lambda path: path.chmod(0o666),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "another's": lambda path: os.chown(path, OTHER, -1),
}


@pytest.mark.time_limit(100)
@pytest.mark.parametrize("name", [n for n in SPOILT if n != "another's" or os.geteuid() == 0])
def test_what_is_not_as_it_came_is_not_run(name: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = copy.rglob("*.o")
    monkeypatch.setattr(shipped, "folder", lambda: copy)
    assert shipped.read_shipped("plus_one") is not None
    SPOILT[name](path)
    assert shipped.read_shipped("plus_one") is None


def test_a_link_as_installers_make_it_is_followed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = copy.rglob("*.o")
    path.rename(copy / "elsewhere")
    path.symlink_to(copy / "elsewhere")
    monkeypatch.setattr(shipped, "folder", lambda: copy)
    assert shipped.read_shipped("plus_one") is not None


@as_root
def test_roots_files_are_read_by_users(copy: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | 0o055)
    assert ran(tmp_path / "none", copy, user=OTHER) == "42 shipped False"


def test_each_kind_of_processor_gets_its_level() -> None:
    def picked(*features: str) -> str | None:
        level = best_level(dict.fromkeys(features, True))
        return None if level is None else level.name

    if platform.machine() == "aarch64":
        assert picked("neon", "sve") == "armv8-a"
        return
    best, second = levels_here()
    haswell = second.features
    skylake = (*haswell, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
    assert picked(*haswell) == picked(*skylake) == "x86-64-v3"
    assert picked(*skylake, "avx512vbmi", "avx512vbmi2", "gfni") == best.name == "x86-64-v4-vbmi"
    assert picked(*haswell[:-1]) is None
    assert best_level({}) is None


@pytest.mark.parametrize("level", mode.sample([level.name for level in levels_here()], 1, "levels"))
def test_every_level_is_compiled_for_on_any_machine_of_its_kind(level: str, tmp_path: Path) -> None:
    assert ran(tmp_path, tmp_path, level) == "made compiled True"
    (path,) = tmp_path.rglob("*.o")
    assert {"plus_one", "plus_one_py"} <= symbols_of(path.read_bytes()[32:]).functions


def test_a_build_goes_on_without_numba_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for why in ("LOWSHARD_BUILD_CODE=off", "numba is not installed"):
        if "=" in why:
            monkeypatch.setenv("LOWSHARD_BUILD_CODE", "off")
        else:
            monkeypatch.setattr(ship_objects.importlib.util, "find_spec", lambda name: None)
        assert ship_objects.main(str(tmp_path / "objects")) == 0
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert why in said
        assert not (tmp_path / "objects").exists()


def test_what_a_build_compiles_is_named_as_a_job_names_it(tmp_path: Path) -> None:
    """In a checkout and installed files lie in other places; names tell of what is in them."""
    from lowshard.compiled import digest_of

    for place in ("a/z.py", "z/a.py"):
        (tmp_path / place).parent.mkdir()
    (tmp_path / "a/z.py").write_text("1")
    (tmp_path / "a/b.py").write_text("2")
    (tmp_path / "z/a.py").write_text("1")
    assert digest_of([tmp_path / "a/z.py", tmp_path / "a/b.py"]) == digest_of(
        [tmp_path / "z/a.py", tmp_path / "a/b.py"]
    )
    assert digest_of([tmp_path / "a/b.py"]) != digest_of([tmp_path / "a/z.py"])


SLOW = """
from lowshard.compiled import INT, Signature, cache, load_compiled
cache.SILENT_S = 0.01
def plus_one(x):
    return x + 1
for name in ("first_x", "second_x"):
    load_compiled(name, lambda: plus_one, Signature((INT,)))
"""


@pytest.mark.parametrize("rank", mode.sample(["0", "1"], 1, "ranks that compile"))
def test_compiling_that_takes_long_is_told_once_and_on_rank_0(rank: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMPI_COMM_WORLD_RANK": rank,
    }
    done = subprocess.run(
        [sys.executable, "-c", SLOW], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("\n") == (1 if rank == "0" else 0)
    assert ("lowshard: compiling for this processor, once (first; " in done.stderr) == (rank == "0")
