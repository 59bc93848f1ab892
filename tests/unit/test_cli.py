"""The command line as a whole: help, version, wrong usage, the exit code of each error."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lowshard import __version__, cli, errors
from lowshard.errors import LowshardError
from lowshard.weights import reshard_command


def test_help_lists_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("demo", "run", "doctor", "2 wrong usage", "72 ranks disagreed"):
        assert part in shown


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"lowshard {__version__}"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["run"], ["demo", "--ranks", "many"]])
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: lowshard" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    code = cli.main(["demo", "--checkpoint", f"{tmp_path}/none.safetensors"])
    assert code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("lowshard: error: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (PermissionError(13, "Permission denied", "/x"), 1, "the system refused"),
        (errors.TimedOut("too late"), 71, "too late"),  # which is an OSError too
        (errors.CheckpointError("no"), 2, "no"),
    ],
)
def test_an_error_of_the_system_is_one_line_too(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    told: str,
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(reshard_command, "parse_size", fail)
    assert cli.main(["reshard", "a", "b", "--merged"]) == code
    assert re.fullmatch(f"lowshard: error: {told}.*\n", capsys.readouterr().err)


def test_every_error_class_is_ours_and_a_builtin_too_with_a_documented_exit_code() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    for kind in classes:
        assert issubclass(kind, LowshardError)
        assert kind.exit_code in (1, 2, 70, 71, 72)
        if kind is not LowshardError:
            builtins = {b for b in kind.__mro__ if b.__module__ == "builtins"} - {
                Exception,
                BaseException,
                object,
            }
            assert builtins, f"{kind.__name__} derives from no fitting builtin"
    known = errors.MismatchError, errors.PeerFailed, errors.TimedOut
    assert [kind.exit_code for kind in known] == [72, 70, 71]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("bench allreduce", "all_reduce"), ("bench all_reduce -d flaot32", "float32"), ("reshrad a b", "reshard"),
        ("doctor --jsn", "--jsn"), ("rules chek --rules default", "check"), ("run --rank 4 train.py", "ranks"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_with_what_may_be_written(
    argv: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv.split())
    shown = capsys.readouterr().err
    assert shown.startswith("usage: lowshard")
    assert told in shown.partition(": error: ")[2]


def test_an_option_of_the_script_is_the_scripts_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = cli.build_parser().parse_args(["run", "-np", "4", "train.py", "-H", "a", "--host", "--nnodes=2"])
    assert (args.ranks, args.target) == (4, ["train.py", "-H", "a", "--host", "--nnodes=2"])


def test_run_says_to_leave_the_interpreter_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-n", "2", "python3.11", "train.py"]) == 2
    assert "leave 'python3.11' out" in capsys.readouterr().err


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from every_parser(below)


PARSERS = {parser.prog: parser for parser in every_parser(cli.build_parser())}


@pytest.mark.parametrize("prog", PARSERS)
def test_every_help_says_what_it_does_and_its_examples_are_right(prog: str) -> None:
    parser = PARSERS[prog]
    assert parser.description
    shown = parser.format_help()
    options = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    assert all(action.help or action.choices for action in options), shown
    _, _, examples = shown.partition("examples:\n")
    assert examples or prog not in ("lowshard", "lowshard run", "lowshard reshard", "lowshard rules")
    words_end = "  #" if prog == "lowshard rules" else "  "  # there columns are in line
    for line in re.findall(r"^  (lowshard .*)$", examples, re.MULTILINE):
        words = line.partition(words_end)[0].partition(" >")[0].split()
        PARSERS["lowshard"].parse_args(words[1:])


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [(["doctor", "--settings"], ""), (["doctor", "--settings", "--json"], "1"), (["rules", "--help"], "")],
)
def test_who_stops_reading_or_has_no_room_gets_no_traceback(argv: list[str], unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "lowshard", *argv]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ran = subprocess.run(
            command, env=env, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write_end)
    assert ran.stderr == ""
    assert ran.returncode in ((0, 141) if "--help" in argv else (141,))
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in ran.stderr
    if "--help" not in argv:
        assert (ran.returncode, ran.stderr.count("cannot be written: No space left")) == (1, 1)
