"""The doctor's findings that this machine may not show: barred memory, task groups, NCCL and one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowshard.launch.check_library import check_loaded, check_lowshard
from lowshard.launch.check_machine import nccl_advice
from lowshard.launch.check_mpi import check_autogroup, check_sharing, sharing_finding
from lowshard.launch.doctor_finding import run_python
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


def test_a_child_that_fails_is_told_by_its_last_line() -> None:
    status, text = run_python("import sys; print('so far'); sys.exit('no more')", [])
    assert (status, text) == ("status 1 no more", "so far\n")
