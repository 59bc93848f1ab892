"""The step `collectives`: every collective on MPI ranks; on a GPU through host memory, then through NCCL."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lowshard.selftest.comparisons import Tally
from lowshard.selftest.over_mpi import run_over_mpi
from lowshard.selftest.step_setting import MULTI_RANK_NCCL, Setting


def run(setting: Setting, tally: Tally) -> None:
    """Run every collective over each transport that this machine has for so many ranks."""
    ways: list[Literal["auto", "nccl", "staged"]] = ["auto"]
    reason = ""
    if setting.device == "cuda":
        reason = why_no_nccl(setting.ranks)
        ways = ["staged"] if reason else ["staged", "nccl"]
    limit_s = setting.limit_s / len(ways)
    through = [run_over_mpi("collectives", replace(setting, transport=way), tally, limit_s) for way in ways]
    tally.summary = f"{tally.checks} results, {setting.ranks} MPI ranks through {' and '.join(through)}"
    if reason:
        tally.summary += f"; not NCCL: {reason}"


def why_no_nccl(ranks: int) -> str:
    """Return why so many ranks cannot use NCCL on this machine, or ""."""
    from lowshard.comm.nccl_bindings import Binding
    from lowshard.errors import DependencyError

    try:
        binding = Binding.load()
    except DependencyError as error:
        return str(error)
    version, gpus = int(binding.nccl.get_version()), int(binding.xp.cuda.runtime.getDeviceCount())
    if ranks > gpus and version < MULTI_RANK_NCCL:
        return f"{ranks} ranks on {gpus} GPU(s) need NCCL 2.30.3 or newer, loaded is {version}"
    return ""
