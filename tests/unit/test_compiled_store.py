"""Object files on disk: what others can write to, what is no file and what is not whole is neither loaded nor run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support import mode
from support.other_user import as_root, as_user

from lowshard.compiled.elf import symbols_of
from lowshard.compiled.store import ObjectStore

ROOT = Path(__file__).resolve().parents[2]
OTHER = 65534
"""Another user, where the test may make files of others."""

# Compiles a function or finds it on disk, and says which, with the function's result.
PROGRAM = """
from lowshard.compiled import INT, Signature, load_compiled, origins
def plus_one(x):
    return x + 1
print(load_compiled("plus_one", lambda: plus_one, Signature((INT,)))(41), origins["plus_one"])
"""


def ran(cache: Path, user: int | None = None, **variables: str) -> tuple[str, str]:
    """Run the program, as another user perhaps, and return what it printed on stdout and stderr."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    env |= {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), "HOME": "/", **variables}
    done = subprocess.run(
        [*([] if user is None else as_user(user)), sys.executable, "-W", "error", "-c", PROGRAM], env=env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stderr.splitlines(keepends=True)
    return done.stdout.strip(), "".join(
        line for line in lines if "lowshard: compiling" not in line
    )  # on a busy machine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the program's function."""
    cache = tmp_path_factory.mktemp("made")
    assert ran(cache) == ("42 compiled", "")
    assert ran(cache) == ("42 disk", "")
    (path,) = cache.rglob("*.o")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o600]
    return cache


@pytest.fixture(scope="module")
def code(made: Path) -> bytes:
    """The object file of the program's function, as it is on disk."""
    (path,) = made.rglob("*.o")
    return path.read_bytes()


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


def kept(cache: Path, code: bytes) -> tuple[ObjectStore, Path]:
    """Return a store that has the function, and its file."""
    store = ObjectStore(cache / "lowshard", "machine")
    assert store.write("plus_one", code)
    assert store.read("plus_one") == code
    return store, cache / "lowshard" / "machine" / "plus_one.o"


def link_to(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


Spoil = Callable[[Path], object]
FILES: dict[str, Spoil] = {
    "another's": lambda path: os.chown(path, OTHER, -1),
    "writable by the group": lambda path: path.chmod(0o620),
    "writable by others": lambda path: path.chmod(0o602),
    "a link": lambda path: link_to(path, path.with_name("elsewhere")),
    "a FIFO": lambda path: replaced(path, os.mkfifo),
    "a folder": lambda path: replaced(path, Path.mkdir),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "of another name": lambda path: path.rename(path.with_name("other.o")),
}
FOLDERS: dict[str, Spoil] = {
    "another's folder": lambda path: os.chown(path.parent, OTHER, -1),
    "another's cache": lambda path: os.chown(path.parent.parent, OTHER, -1),
    "folder writable by the group": lambda path: path.parent.chmod(0o770),
    "cache writable by others": lambda path: path.parent.parent.chmod(0o1777),
    "a linked folder": lambda path: link_to(path.parent, path.parent.with_name("elsewhere")),
    "a linked cache": lambda path: link_to(path.parent.parent, path.parents[2] / "elsewhere"),
}


def allowed(names: dict[str, Spoil]) -> list[str]:
    return [name for name in names if "another's" not in name or os.geteuid() == 0]


@pytest.mark.parametrize("name", allowed(FILES | FOLDERS))
def test_what_others_may_have_planted_is_not_read(name: str, tmp_path: Path) -> None:
    store, path = kept(tmp_path, b"some code")
    (FILES | FOLDERS)[name](path)
    assert store.read("other" if name == "of another name" else "plus_one") is None
    # In a folder of our own it is replaced, unless it is a folder; other folders are left alone.
    replaces = name in FILES and name != "a folder"
    assert store.write("plus_one", b"new code") == replaces
    assert store.read("plus_one") == (b"new code" if replaces else None)


def machine_folder(cache: Path) -> Path:
    (folder,) = (cache / "lowshard").iterdir()
    return folder


@pytest.mark.time_limit(200)
@pytest.mark.parametrize("name", mode.sample(allowed(FOLDERS), 1, "planted folders"))
@pytest.mark.full_only
def test_where_a_folder_is_not_this_users_alone_code_is_compiled_in_memory_and_that_is_said_once(
    name: str, cache: Path
) -> None:
    FOLDERS[name](machine_folder(cache) / "plus_one.o")
    printed, said = ran(cache)
    assert printed == "42 memory"
    assert said.count("\n") == 1
    assert "compiled code is neither kept in" in said


PLANTED = {
    "nothing": lambda code: b"",
    "text": lambda code: b"no code at all\n" * 99,
    "half": lambda code: code[: len(code) // 2],
    "another's symbols": lambda code: code.replace(b"plus_one", b"plus_two"),
    "no symbols": lambda code: code[:60] + b"\x01\x00" + code[62:],
    "another machine's": lambda code: code[:18] + b"\x02\x00" + code[20:],
}


@pytest.mark.time_limit(200)
@pytest.mark.parametrize("name", mode.sample(list(PLANTED), 1, "planted code"))
@pytest.mark.full_only
def test_a_right_checksum_over_what_is_no_such_function_is_compiled_anew(name: str, cache: Path) -> None:
    folder = machine_folder(cache)
    store = ObjectStore(folder.parent, folder.name)
    whole = store.read("plus_one")
    assert whole is not None
    assert store.write("plus_one", PLANTED[name](whole))
    assert ran(cache) == ("42 compiled", "")
    assert ran(cache) == ("42 disk", "")


def test_no_part_of_an_object_file_passes_for_a_whole_one(code: bytes) -> None:
    whole = code[32:]
    assert {"plus_one", "plus_one_py"} <= symbols_of(whole).functions
    assert "PyLong_AsLongLong" in symbols_of(whole).called
    for size in range(0, len(whole), 1 if mode.full() else 7):
        with pytest.raises(ValueError, match="not an object file"):
            symbols_of(whole[:size])


def test_a_spoiled_table_is_a_plain_error(code: bytes) -> None:
    whole, rng = code[32:], mode.rng("spoiled objects")
    for _ in range(20_000 if mode.full() else 1000):
        spoiled = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            spoiled[at] = rng.integers(256)
        with suppress(ValueError):
            symbols_of(bytes(spoiled))


@pytest.mark.full_only
@as_root
@pytest.mark.time_limit(200)
def test_in_a_folder_for_everybody_another_users_code_is_not_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert ran(tmp_path, OTHER)[0] == "42 compiled"  # a real one, where everybody looks for it
    printed, said = ran(tmp_path)
    assert printed == "42 memory"
    assert f"belongs to user {OTHER}" in said
    printed, said = ran(tmp_path, 54321)
    assert printed == "42 memory"
    assert "Permission" in said or "belongs to" in said
    assert ran(tmp_path, OTHER) == ("42 disk", "")


@pytest.mark.full_only
@pytest.mark.time_limit(200)
def test_the_number_of_threads_makes_no_code_of_its_own(tmp_path: Path) -> None:
    assert ran(tmp_path)[0] == "42 compiled"
    for threads in ("1", "7"):
        assert ran(tmp_path, NUMBA_NUM_THREADS=threads, NUMBA_FULL_TRACEBACKS="1") == ("42 disk", "")
    assert ran(tmp_path, NUMBA_OPT="1")[0] == "42 compiled"


def test_the_lock_is_no_link_and_no_fifo(tmp_path: Path) -> None:
    store, path = kept(tmp_path, b"some code")
    with store.locked("plus_one"):
        (lock,) = path.parent.glob("lock*")
    lock.unlink()
    lock.symlink_to(tmp_path / "made")
    with store.locked("plus_one"):
        assert not (tmp_path / "made").exists()
    lock.unlink()
    os.mkfifo(lock)
    with store.locked("plus_one"):
        assert store.read("plus_one") == b"some code"
