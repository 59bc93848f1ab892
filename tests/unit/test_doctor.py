"""The doctor's findings that this machine may not show: barred memory, task groups, NCCL and one GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lowshard.launch import find_mpi, mpiexec
from lowshard.launch.check_library import _import_in_child, check_loaded, check_lowshard
from lowshard.launch.check_machine import nccl_advice
from lowshard.launch.check_mpi import check_autogroup, check_sharing, plain_start_finding, sharing_finding
from lowshard.launch.doctor_command import print_table
from lowshard.launch.doctor_finding import Check, last_object, run_python
from lowshard.launch.mpiexec import MpiInstall


def install(family: str) -> MpiInstall:
    return MpiInstall(family, family, "1", "/lib/libmpi.so", "", "/bin/mpiexec", True)


@pytest.mark.parametrize(
    ("text", "family", "status"),
    [
        ("1\n", "mpich", "warning"),
        ("1\n", "openmpi", "ok"),
        ("0\n", "mpich", "ok"),
        ("1\n", None, "ok"),
        (None, "mpich", "ok"),
    ],
)
def test_task_groups_are_a_warning_for_hydra_alone(
    tmp_path: Path, text: str | None, family: str | None, status: str
) -> None:
    setting = tmp_path / "autogroup"
    if text is not None:
        setting.write_text(text)
    check = check_autogroup(None if family is None else install(family), setting)
    assert check.status == status
    assert ("sysctl kernel.sched_autogroup_enabled=0" in check.advice) == (status == "warning")


@pytest.mark.parametrize(
    ("found", "status", "told"),
    [
        ({"memfd": "", "readv": "", "writev": ""}, "ok", "windows"),
        (
            {"memfd": "Permission denied", "readv": "", "writev": ""},
            "warning",
            "through /proc: Permission denied",
        ),
        (
            {"memfd": "", "readv": "Operation not permitted", "writev": ""},
            "warning",
            "process_vm_readv: Operation not permitted",
        ),
    ],
)
def test_memory_that_may_not_be_shared_is_told_with_what_it_costs(
    found: dict[str, str], status: str, told: str
) -> None:
    check = sharing_finding("status 0", json.dumps(found) + "\n")
    assert check.status == status
    assert told in check.detail
    assert ("ptrace" in check.advice.lower()) == (status != "ok")


@pytest.mark.parametrize(
    ("family", "is_root", "env", "status"),
    [
        ("openmpi", True, {}, "warning"),
        ("openmpi", True, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, "warning"),
        ("openmpi", True, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, "ok"),
        ("openmpi", False, {}, "ok"),
        ("mpich", True, {}, "ok"),
    ],
)
def test_root_under_open_mpi_is_told_what_to_write(
    family: str, is_root: bool, env: dict[str, str], status: str
) -> None:
    check = plain_start_finding(install(family), is_root, env, 2)
    assert check.status == status
    assert ("write lowshard run -n N" in check.advice) == (status == "warning")
    assert ("--oversubscribe" in check.advice) == (family == "openmpi")


def test_the_table_fits_80_columns_into_a_pipe_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    long = f"/a/{'b' * 200}/c"
    checks = [
        Check("ok one", "ok", "short"),
        Check("long one", "warning", long, "advice " * 30),
        Check("bad one", "broken", "x", "pip install it", required=True),
    ]
    print_table(checks, False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert long in "".join(line.strip() for line in lines[:6]).replace("warning  long one", "")
    assert sum(line.count("advice") for line in lines) == 30
    assert any(line.startswith("broken *") for line in lines)


def test_a_trial_that_crashes_is_a_finding() -> None:
    assert sharing_finding("status -11", "").status == "broken"


def test_sharing_is_really_tried() -> None:
    check = check_sharing()
    assert check.status in ("ok", "warning"), check.detail
    if check.status == "ok":
        assert "process_vm_readv" in check.detail


def test_the_libraries_that_the_linker_chose_are_named_with_version_and_path() -> None:
    blas, llvm = check_loaded()
    assert Path(llvm.detail.split(", ")[1]).exists()
    assert llvm.detail[0].isdigit()
    assert blas.status == "warning" or Path(blas.detail.split(", ")[1]).exists()
    assert Path(check_lowshard().detail.split(", ")[1]).is_dir()


@pytest.mark.parametrize(
    ("version", "gpus", "told"),
    [
        (22809, 1, "one rank on this one GPU"),
        (23007, 1, "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (23007, 2, ""),
        (22809, 0, ""),
    ],
)
def test_one_gpu_and_several_ranks(version: int, gpus: int, told: str) -> None:
    assert nccl_advice(version, gpus).startswith(told) if not told else told in nccl_advice(version, gpus)


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


def test_a_child_that_fails_is_told_by_its_last_line() -> None:
    status, text = run_python("import sys; print('so far'); sys.exit('no more')", [])
    assert (status, text) == ("status 1 no more", "so far\n")
