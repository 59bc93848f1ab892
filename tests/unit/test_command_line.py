"""Flags of commands: what each kind takes, and what it says of everything else, before any work is done."""

from __future__ import annotations

import os
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from lowshard import cli, plain_console
from lowshard.bench.bench_argument import file, list_of, natural, positive, size
from lowshard.command_line import count_of, folder_of, made_target_of, seconds_of, write_whole
from lowshard.plain_console import busy

NO_NUMBERS = ("", " ", "x", "nan", "inf", "-inf", "1e400", "-1", "é")


@pytest.mark.parametrize(
    ("flag", "right", "wrong"),
    [
        (count_of, {"1": 1, "1000000000": 10**9}, ("0", "1.0", "٣", "²", "1000000001", "9" * 5000)),
        (natural, {"0": 0, "07": 7}, ("1.0", "1e3", "٣", "9" * 5000)),
        (list_of(count_of), {"2": (2,), "4, 2,4": (4, 2)}, ("2,", ",", "0,1")),
        (seconds_of, {"0.5": 0.5, "1e3": 1000.0}, ("0", "0.0")),
        (positive, {"1.5": 1.5}, ("0",)),
        (size, {"1": 1, "1.5K": 1536}, ("0", "1.3", "9" * 400, "1048577T")),
    ],
)
def test_numbers(flag: Callable[[str], object], right: dict[str, object], wrong: tuple[str, ...]) -> None:
    assert {text: flag(text) for text in right} == right
    for text in (*NO_NUMBERS, *wrong):
        with pytest.raises(ArgumentTypeError, match="got "):
            flag(text)


def test_files_and_folders_are_asked_for_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("kept")
    Path("folder").mkdir()
    targets = ["-", "there", "a/new", "/dev/null"]
    assert [made_target_of(text) for text in targets] == targets
    assert [folder_of(text) for text in (".", "folder", "a/b")] == [Path("."), Path("folder"), Path("a/b")]
    assert sorted(os.listdir()) == ["folder", "there"]
    assert Path("there").read_text() == "kept"
    for flag, text, told in (
        *((file, text, "expected a file") for text in ("~/x.json", "", "folder", "there/x", "a/new")),
        (folder_of, "~/x", "a shell expands ~"),
        (folder_of, "/proc/x", "no file can be made"),
    ):
        with pytest.raises(ArgumentTypeError, match=told):
            flag(text)


def test_a_device_stays_one_and_a_link_is_followed(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to("file")
    write_whole(link, b"more")
    assert link.is_symlink()
    assert file.read_bytes() == b"more"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench all_reduce -i 1", "a larger -i"),
        ("bench fsdp --check", "--compare-torch"),
        ("bench fsdp --mode hybrid --intra 3", "a divisor"),
        ("bench refit --only nothing", "in no row's name"),
        ("bench refit --ranks 5", "an even --ranks"),
        ("bench refit --size 900000000", "a smaller --size"),
    ],
)
def test_what_measures_nothing_is_refused(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "bench all_reduce --json=~/x.json", "bench publish --json=~/x.json", "bench all_reduce --csv ~/x",
        "bench plan --plot ~/x.png", "bench broadcast -r -1", "bench fsdp --steps 0", "bench refit --seed -1",
        "demo -o ~/x", "demo --timeout inf", "selftest -o ~/x", "rules dump --rules default --devices 1 -o ~/x",
    ],
)  # fmt: skip
def test_what_cannot_be_is_wrong_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert ": error: argument " in capsys.readouterr().err


def test_what_takes_long_is_told_of_in_a_pipe_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with busy("solve", "solving 3 ops"):
        pass
    monkeypatch.setattr(plain_console, "_QUIET_S", 0.01)
    with busy("solve", "solving 4 ops"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "lowshard solve: solving 4 ops\n"
