"""The doctor's findings that this machine may not show: barred memory, children that crash."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lowshard.launch import find_mpi, mpiexec
from lowshard.launch.check_library import _import_in_child
from lowshard.launch.check_mpi import check_sharing, sharing_finding
from lowshard.launch.doctor_command import print_table
from lowshard.launch.doctor_finding import Check, last_object, run_python


@pytest.mark.parametrize(
    ("found", "status", "told"),
    [
        ({"memfd": "", "readv": ""}, "ok", "windows"),
        ({"memfd": "Permission denied", "readv": ""}, "warning", "/proc"),
        ({"memfd": "", "readv": "Operation not permitted"}, "warning", "process_vm_readv"),
    ],
)
def test_memory_that_may_not_be_shared_is_told_with_what_it_costs(
    found: dict[str, str], status: str, told: str
) -> None:
    check = sharing_finding("status 0", json.dumps(found) + "\n")
    assert check.status == status
    assert told in check.detail
    assert ("ptrace" in check.advice.lower()) == (status != "ok")


def test_what_is_broken_is_marked_with_its_remedy_below(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("good", "ok", "1.0"), Check("bad", "broken", "x", "pip install it", required=True)]
    print_table(checks, False)
    shown = capsys.readouterr().out
    assert "pip install it" in shown
    assert "does NOT work" in shown


def test_a_trial_that_crashes_is_a_finding() -> None:
    assert sharing_finding("status -11", "").status == "broken"


def test_sharing_is_really_tried() -> None:
    check = check_sharing()
    assert check.status in ("ok", "warning"), check.detail
    if check.status == "ok":
        assert "process_vm_readv" in check.detail


def test_what_libraries_print_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = (
        "import atexit, sys\n"
        "def say():\n"
        "    print('[isal] hello', '[]', '{', '{}', '[[], 1, 2]', sep='\\n', flush=True)\n"
        "    sys.stdout.buffer.write(b'caf\\xe9\\n')\n"
        "say()\n"
        "atexit.register(say)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    status, text = run_python("print('{\"a\": 1}')", [])
    assert (status, last_object(text)) == ("status 0", {"a": 1})
    found = _import_in_child(["json", "no_such"])
    assert {name: state for name, (state, _) in found.items()} == {"json": "ok", "no_such": "missing"}
    mpiexec._probe_library.cache_clear()
    assert find_mpi().version
