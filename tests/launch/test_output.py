"""What ranks print goes out whole, with its rank in front; why it cannot be written is kept."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from lowshard.launch.output import Output

MIB = 1 << 20


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test has opened."""
    with ExitStack() as stack:
        yield stack


def said(file: TextIO, text: str) -> BaseException | None:
    """Writes a text to a file as the launcher's own words; returns what the file has raised."""
    output = Output((io.StringIO(), file), prefix=True)
    output.say(text)
    output.say(text)
    output.settle(is_over=True)
    return output.error


def test_why_a_file_takes_no_more_is_kept(tmp_path: Path) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  it raises again when it is closed
    error = said(full, "text\n")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    there, here = os.pipe()
    os.close(there)
    unread = os.fdopen(here, "w")
    assert isinstance(said(unread, "text\n"), BrokenPipeError)
    for file in (full, unread):
        with pytest.raises(OSError, match=r"No space|Broken pipe"):
            file.close()
    closed = (tmp_path / "closed").open("w")
    closed.close()
    assert isinstance(said(closed, "text\n"), ValueError)


def test_files_of_all_kinds_get_the_bytes(opened: ExitStack, tmp_path: Path) -> None:
    read_back = opened.enter_context((tmp_path / "a").open("w+", encoding="utf-8"))
    read_back.write("before ")
    assert said(read_back, "ü") is None
    read_back.seek(0)
    assert read_back.read() == "before üü"
    text = io.StringIO()
    assert said(text, "ü") is None
    assert text.getvalue() == "üü"


class Kept(io.StringIO):
    """A text file that keeps the pieces that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, text: str) -> int:
        self.written.append(text.encode())
        return len(text)


def made(prefix: bool) -> tuple[Output, Kept]:
    out = Kept()
    return Output((out, io.StringIO()), prefix), out


@pytest.mark.parametrize("prefix", [True, False])
def test_what_has_no_line_end_goes_out_in_pieces(prefix: bool) -> None:
    output, out = made(prefix)
    for _ in range(3 * MIB >> 14):
        output.add(3, 0, b"x" * (1 << 14))
    assert len(out.written) >= 2  # while the line goes on
    assert max(map(len, out.written)) < MIB + (1 << 17)
    output.add(3, 0, b"yy\nz")
    output.settle(is_over=True)
    text = b"".join(out.written)
    assert text.replace(b"[3] ", b"").replace(b"\n", b"") == b"x" * (3 * MIB) + b"yyz"
    assert text.startswith(b"[3] x") == prefix
    if not prefix:
        assert text.endswith(b"yy\nz")
    else:
        assert all(line.startswith(b"[3] ") for line in text.splitlines())


def test_lines_and_their_parts_get_one_prefix_each() -> None:
    output, out = made(True)
    for data in (b"a", b"b\n\nc", b"\nd\r\ne\n", b"f"):
        output.add(3, 0, data)
        output.settle()
    output.settle(is_over=True)
    assert b"".join(out.written) == b"[3] ab\n[3] \n[3] c\n[3] d\r\n[3] e\n[3] f\n"


def test_a_prompt_goes_out_where_no_more_of_its_line_comes() -> None:
    output, out = made(False)
    output.add(0, 0, b"name? ")
    output.settle()
    assert out.written == []
    output.settle()
    assert out.written == [b"name? "]
