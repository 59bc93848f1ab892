"""What ranks print goes out whole, and no reader, however slow, keeps the launcher from ending."""

from __future__ import annotations

import errno
import io
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from lowshard.launch.output import Output
from lowshard.launch.sink import Sink

MIB = 1 << 20


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test has opened."""
    with ExitStack() as stack:
        yield stack


def pipe_ends() -> tuple[int, int]:
    return os.pipe()


def socket_ends() -> tuple[int, int]:
    there, here = socket.socketpair()
    return there.detach(), here.detach()


def terminal_ends() -> tuple[int, int]:
    return os.openpty()


def fifo_ends() -> tuple[int, int]:
    """A pipe whose writing end does not wait, as another process may have set it."""
    there, here = os.pipe()
    os.set_blocking(here, False)
    return there, here


WAYS = [pipe_ends, socket_ends, terminal_ends, fifo_ends]


def file_at(fd: int, opened: ExitStack) -> TextIO:
    return opened.enter_context(os.fdopen(fd, "w", encoding="utf-8"))


@pytest.mark.parametrize("ends", WAYS)
def test_a_reader_that_has_stopped_is_given_up_once_the_job_is_to_end(
    ends: Callable[[], tuple[int, int]], opened: ExitStack
) -> None:
    there, here = ends()
    opened.callback(os.close, there)
    end_s = time.monotonic() + 0.3
    sink = Sink(file_at(here, opened), lambda: end_s)
    was_blocking = os.get_blocking(here)
    sink.write(b"x" * (4 * MIB))  # in a thread of its own it would never come back
    assert sink.is_cut
    assert sink.error is None
    assert 0 <= time.monotonic() - end_s < 5
    assert os.get_blocking(here) == was_blocking  # others have the same file
    sink.write(b"more")
    sink.write_text("more")


@pytest.mark.parametrize("ends", WAYS)
def test_a_reader_that_is_slow_gets_all(ends: Callable[[], tuple[int, int]], opened: ExitStack) -> None:
    there, here = ends()
    opened.callback(os.close, there)
    sink = Sink(file_at(here, opened), lambda: math.inf)
    data = bytes(range(65, 91)) * (MIB // 26)
    writer = threading.Thread(target=sink.write, args=(data,), daemon=True)
    writer.start()
    time.sleep(0.2)
    read = b""
    while len(read) < len(data):
        read += os.read(there, 1 << 16)
    writer.join(20)
    assert read == data
    assert not sink.is_cut
    assert sink.error is None


def test_why_a_file_takes_no_more_is_kept(opened: ExitStack, tmp_path: Path) -> None:
    full = Sink(file_at(os.open("/dev/full", os.O_WRONLY), opened), lambda: math.inf)
    full.write(b"text\n")
    assert isinstance(full.error, OSError)
    assert full.error.errno == errno.ENOSPC

    there, here = os.pipe()
    os.close(there)
    unread = Sink(file_at(here, opened), lambda: math.inf)
    unread.write(b"text\n")
    assert isinstance(unread.error, BrokenPipeError)

    closed = Sink((tmp_path / "closed").open("w"), lambda: math.inf)
    closed._file.close()
    closed.write(b"text\n")
    assert isinstance(closed.error, ValueError)


def test_files_of_all_kinds_get_the_bytes(opened: ExitStack, tmp_path: Path) -> None:
    data = "grün\n".encode()
    read_back = opened.enter_context((tmp_path / "a").open("w+", encoding="utf-8"))
    read_back.write("before ")
    sink = Sink(read_back, lambda: math.inf)
    sink.write(data)
    sink.write_text("ü")
    read_back.seek(0)
    assert read_back.read() == "before grün\nü"

    unbuffered = io.TextIOWrapper(io.FileIO(tmp_path / "b", "w"), encoding="latin-1", write_through=True)
    sink = Sink(opened.enter_context(unbuffered), lambda: math.inf)
    sink.write(data)
    sink.write_text("ü\u4f60")
    assert (tmp_path / "b").read_bytes() == data + b"\xfc\\u4f60"

    text, packed = io.StringIO(), io.BytesIO()
    for file in (text, io.TextIOWrapper(packed, encoding="utf-8")):
        sink = Sink(file, lambda: math.inf)
        sink.write(data)
        sink.write_text("ü")
        assert sink.error is None
        if file is text:
            assert text.getvalue() == "grün\nü"
        else:
            assert packed.getvalue() == data + "ü".encode()


class Kept(Sink):
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), lambda: math.inf)
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        if data:
            self.written.append(data)


@pytest.fixture
def writes(opened: ExitStack) -> Callable[[bool], tuple[Output, Kept, Callable[[bytes], None]]]:
    """Returns an output of one rank, with what it has written and what makes the rank write."""

    def made(prefix: bool) -> tuple[Output, Kept, Callable[[bytes], None]]:
        out = Kept()
        output = Output((out, Kept()), prefix)
        there, here = os.pipe()
        opened.callback(os.close, there)
        output.add(there, 0, 3)

        def write(data: bytes) -> None:
            for at in range(0, len(data), 1 << 14):
                os.write(here, data[at : at + (1 << 14)])
                output.pump(0.01)
            if not data:
                os.close(here)

        return output, out, write

    return made


@pytest.mark.parametrize("prefix", [True, False])
def test_what_has_no_line_end_goes_out_in_pieces(
    prefix: bool, writes: Callable[[bool], tuple[Output, Kept, Callable[[bytes], None]]]
) -> None:
    output, out, write = writes(prefix)
    write(b"x" * (3 * MIB))
    assert len(out.written) >= 2  # while the line goes on
    assert max(map(len, out.written)) < MIB + (1 << 17)
    write(b"yy\nz")
    write(b"")
    output.close()
    text = b"".join(out.written)
    assert text.replace(b"[3] ", b"").replace(b"\n", b"") == b"x" * (3 * MIB) + b"yyz"
    assert text.startswith(b"[3] x") == prefix
    if not prefix:
        assert text.endswith(b"yy\nz")
    else:
        assert all(line.startswith(b"[3] ") for line in text.splitlines())


def test_lines_and_their_parts_get_one_prefix_each(
    writes: Callable[[bool], tuple[Output, Kept, Callable[[bytes], None]]],
) -> None:
    output, out, write = writes(True)
    for data in (b"a", b"b\n\nc", b"\nd\r\ne\n", b"f"):
        write(data)
    write(b"")
    output.close()
    assert b"".join(out.written) == b"[3] ab\n[3] \n[3] c\n[3] d\r\n[3] e\n[3] f\n"
