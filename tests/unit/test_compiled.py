"""Compiled code: what came with the package, what is kept on disk, what of both is used, and who compiles it."""

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

from lowshard.compiled import digest_of, level, store
from lowshard.compiled.level import LEVELS, host_levels, levels_of

ROOT = Path(__file__).resolve().parents[2]
OTHER = 65534
"""Another user, where the test may make files of others."""

# Loads a function where a package would have code in the folder given first; with a level, compiles it for that.
PROGRAM = """
import sys
from pathlib import Path
from lowshard.compiled import INT, Signature, level, load_compiled, origins, store
folder, name, chosen = sys.argv[1:]
store.package_folder = lambda: Path(folder)
level.chosen += [one for one in level.LEVELS if one.name == chosen]
def plus_one(x):
    return x + 1
call = load_compiled(name, lambda: plus_one, Signature((INT,)))
print("made" if chosen else call(41), origins[name], "numba" in sys.modules)
"""

pytestmark = pytest.mark.skipif(not host_levels(), reason="this processor is of no level in LEVELS")


def ran(
    cache: Path, folder: Path | None = None, name: str = "plus_one", chosen: str = "", user: int | None = None,
    **more: str,
) -> tuple[str, str]:  # fmt: skip
    """Run the program, as another user perhaps, and return what it printed on stdout and stderr."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LOWSHARD_"))}
    env |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), "HOME": "/", **more}
    command = [*([] if user is None else as_user(user)), sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(
        [*command, str(folder or cache / "no package"), name, chosen],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines(keepends=True)
    return done.stdout.strip(), "".join(line for line in lines if "lowshard: compiling" not in line)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the program's function."""
    cache = tmp_path_factory.mktemp("made")
    assert ran(cache) == ("42 compiled True", "")
    assert ran(cache) == ("42 disk False", "")
    (path,) = cache.rglob("*.o")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o600]
    return cache


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


@pytest.fixture
def package(made: Path, tmp_path: Path) -> Path:
    """A package's folder with the same code."""
    (path,), level_folder = made.rglob("*.o"), tmp_path / "package" / host_levels()[0].name
    level_folder.mkdir(parents=True)
    shutil.copyfile(path, level_folder / path.name)
    return level_folder.parent


# ---- what is used


def test_what_came_with_the_package_is_used_without_numba_and_nothing_is_kept(
    package: Path, tmp_path: Path
) -> None:
    assert ran(tmp_path / "cache", package) == ("42 shipped False", "")
    assert not list((tmp_path / "cache").rglob("*.o"))


OTHERS: list[dict[str, str]] = [{"name": "plus_1"}, {"NUMBA_OPT": "1"}, {"LOWSHARD_SHIPPED_CODE": "off"}]


@pytest.mark.parametrize("other", mode.sample(OTHERS, 1, "what is compiled"), ids=str)
def test_another_name_or_another_setting_is_compiled(
    package: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    """A name has a digest of the source in it: code of other source has another."""
    assert ran(tmp_path / "cache", package, **other)[0] == "42 compiled True"


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


SPOILT: dict[str, Callable[[Path], object]] = {
    "another's": lambda path: os.chown(path, OTHER, -1),
    "writable by the group": lambda path: path.chmod(0o660),
    "writable by others": lambda path: path.chmod(0o606),
    "a FIFO": lambda path: replaced(path, os.mkfifo),
    "a folder": lambda path: replaced(path, Path.mkdir),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:99] + b"!" + path.read_bytes()[100:]),
}


@pytest.mark.parametrize("name", [n for n in SPOILT if n != "another's" or os.geteuid() == 0])
def test_what_is_not_whole_or_may_be_changed_by_others_is_not_used(
    name: str, cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "cache_folder", lambda: cache / "lowshard")
    monkeypatch.setattr(store, "package_folder", lambda: package)
    best = host_levels()[0]
    for folder, read in (
        (cache, lambda: store.read_kept("plus_one")),
        (package, lambda: store.read_package("plus_one", best)),
    ):
        assert read() is not None
        (path,) = folder.rglob("plus_one.o")
        path.with_name("other.o").write_bytes(path.read_bytes())
        SPOILT[name](path)
        assert read() is None
    assert store.read_kept("other") is None, "code of another name"
    # In a folder of our own it is replaced, unless it is a folder.
    assert store.keep("plus_one", b"new code") == (name != "a folder")
    assert store.read_kept("plus_one") == (None if name == "a folder" else b"new code")


def test_a_link_as_installers_make_it_is_followed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = package.rglob("*.o")
    path.rename(package / "elsewhere")
    path.symlink_to(package / "elsewhere")
    monkeypatch.setattr(store, "package_folder", lambda: package)
    assert store.read_package("plus_one", host_levels()[0]) is not None


@as_root
def test_roots_files_are_read_by_users(package: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | 0o055)
    assert ran(tmp_path / "none", package, user=OTHER)[0] == "42 shipped False"


@pytest.mark.full_only
@as_root
@pytest.mark.time_limit(200)
def test_in_a_folder_for_everybody_another_users_code_is_not_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert ran(tmp_path, user=OTHER)[0] == "42 compiled True"  # a real one, where everybody looks for it
    printed, said = ran(tmp_path, user=54321)
    assert printed == "42 memory True"
    assert said.count("\n") == 1
    assert "compiled code cannot be kept in" in said


def test_the_lock_is_no_link_and_no_fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    with store.locked("plus_one"):
        (lock,) = tmp_path.rglob("lock*")
    lock.unlink()
    lock.symlink_to(tmp_path / "made")
    with store.locked("plus_one"):
        assert not (tmp_path / "made").exists()
    lock.unlink()
    os.mkfifo(lock)
    with store.locked("plus_one"):
        assert store.keep("plus_one", b"some code")


# ---- levels, and what a build makes


def test_each_processor_gets_the_best_level_that_came_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(*features: str) -> list[str]:
        return [one.name for one in levels_of(dict.fromkeys(features, True))]

    if platform.machine() == "aarch64":
        assert names("neon", "sve") == ["armv8-a"]
        return
    best, second = levels_of()
    skylake = (*second.features, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
    assert names(*second.features) == names(*skylake) == ["x86-64-v3"]
    assert names(*skylake, "avx512vbmi", "avx512vbmi2", "gfni") == [best.name, "x86-64-v3"]
    assert names(*second.features[:-1]) == []
    monkeypatch.setattr(store, "package_folder", lambda: tmp_path)
    monkeypatch.setattr(store, "host_levels", lambda: (best, second))
    for came, used in ((None, None), (second, second), (best, best)):
        if came is not None:
            (tmp_path / came.name).mkdir()
        assert store.package_level() == used


@pytest.mark.parametrize("chosen", mode.sample([one.name for one in levels_of()], 1, "levels"))
def test_every_level_is_compiled_for_on_any_machine_of_its_kind(chosen: str, tmp_path: Path) -> None:
    assert ran(tmp_path, chosen=chosen)[0] == "made compiled True"
    (path,) = tmp_path.rglob("*.o")
    assert path.parent.name == next(one for one in LEVELS if one.name == chosen).key


def test_names_tell_of_what_is_in_the_sources_and_not_where_they_lie(tmp_path: Path) -> None:
    for place, text in (("a/z.py", "1"), ("a/b.py", "2"), ("z/a.py", "1")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    z, b, moved = (tmp_path / place for place in ("a/z.py", "a/b.py", "z/a.py"))
    assert digest_of([z, b]) == digest_of([moved, b])
    assert digest_of([b]) != digest_of([z])


def test_the_key_of_a_level_tells_of_what_makes_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {one.key for one in LEVELS}
    assert len(keys) == len(LEVELS)
    monkeypatch.setattr(level, "_sources", lambda: b"another compiler")
    assert not keys & {one.key for one in LEVELS}
