"""Addresses of publishers; their folders, doors and tokens, of which each removes its own alone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowshard.errors import CommError
from lowshard.reshard.publication_address import (
    Address,
    FolderLock,
    new_token,
    read_token,
    remove_token,
    write_token,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/tmp/a", Address(folder=Path("/tmp/a"))),
        ("unix:/tmp/\u00e9:1", Address(folder=Path("/tmp/\u00e9:1"))),
        ("tcp://127.0.0.1:0", Address(host="127.0.0.1")),
        ("tcp://[fd00::2]:4711", Address(host="fd00::2", port=4711)),
        ("tcp://a_host.b-c.example.:65535", Address(host="a_host.b-c.example.", port=65535)),
        ("tcp://b\u00fccher.example:80", Address(host="b\u00fccher.example", port=80)),
        ("tcp://h:00080", Address(host="h", port=80)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["unix:relative", "unix:/tmp/x\0y", "tcp://..:80", "tcp://[]:80", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:",
     "tcp://127.0.0.1:" + "9" * 5000],
    ids=range(7),
)  # fmt: skip
def test_what_cannot_be_met_at_is_no_address(text: str) -> None:
    with pytest.raises(CommError, match="an address is"):
        Address.parse(text)


def _socket_at(path: Path) -> None:
    """Leave a socket at a path, as a process that was killed does."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(path))


def _tree(folder: Path) -> dict[str, Any]:
    """Return what lies in a folder: the content of files, the kind of all else."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else path.stat().st_mode
        for path in folder.rglob("*")
    }


def _private_text(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give a folder that a publisher may take; no descriptor is left over from what a test does with it."""
    made = tmp_path / "p"
    made.mkdir(mode=0o700)
    before = len(os.listdir("/proc/self/fd"))
    yield made
    assert len(os.listdir("/proc/self/fd")) == before


FOREIGN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a token of something else": ("token", lambda p: _private_text(p, "hf_secret")),
    "a token that others read": ("token", lambda p: _private_text(p, "ab" * 32, 0o644)),
    "a token that is too long": ("token", lambda p: _private_text(p, "a" * 8193)),
    "a token that is a folder": ("token", lambda p: (p / "deeper").mkdir(parents=True)),
    "a token that is a link": ("token", lambda p: p.symlink_to("/dev/null")),
    "a listener that is a file": ("listener", lambda p: p.write_text("mine")),
    "a listener that is a folder": ("listener", lambda p: p.mkdir()),
    "a rank's folder with a file": ("rank-0", lambda p: (p.mkdir(), (p / "model.safetensors").write_text("x"))),
    "a rank's listener that is a file": ("rank-0", lambda p: (p.mkdir(), (p / "listener").write_text("x"))),
    "a rank's folder that is a link": ("rank-0", lambda p: p.symlink_to(p.parent)),
    "a rank's file": ("rank-0", lambda p: p.write_text("mine")),
    "a lock of another program": ("lock", lambda p: p.write_text("4711\n")),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_where_something_else_has_such_a_name_is_refused_and_left_as_it_is(
    folder: Path, what: str
) -> None:
    name, make = FOREIGN[what]
    make(folder / name)
    for other in ("listener", "rank-7"):  # of a publisher that was killed: it stays too
        if other != name:
            _socket_at(folder / other) if other == "listener" else (folder / other).mkdir()
    before = _tree(folder)
    with pytest.raises(CommError, match=f"{name}.*give this publisher a folder of its own"):
        FolderLock(folder)
    assert _tree(folder) == before


@pytest.mark.parametrize("token", [None, "", "abc", "ab" * 32])
def test_what_a_killed_publisher_has_left_is_taken_over(folder: Path, token: str | None) -> None:
    _socket_at(folder / "listener")
    for rank in ("rank-1", "rank-20"):
        (folder / rank).mkdir()
        _socket_at(folder / rank / "listener")
    (folder / "rank-3").mkdir()
    (folder / "lock").touch()
    if token is not None:
        _private_text(folder / "token", token)
    lock = FolderLock(folder)
    assert os.listdir(folder) == ["lock"]
    lock.release()
    assert not folder.exists()
    lock.release()


def test_a_token_is_removed_by_who_wrote_it(tmp_path: Path) -> None:
    path, own, others = tmp_path / "deeper" / "token", new_token(), new_token()
    write_token(path, own)
    remove_token(path, others)
    assert read_token(path) == own
    remove_token(path, own)
    assert not path.exists()
    remove_token(path, own)
    path.mkdir()
    remove_token(path, own)
    assert path.is_dir()
