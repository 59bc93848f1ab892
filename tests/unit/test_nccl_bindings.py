"""What must be installed for arrays on GPUs, and what keeps ranks from NCCL: named, without importing CuPy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.comm_kit import refused

from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import crowding, why_unusable
from lowshard.errors import DependencyError


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    refused(Binding.load, DependencyError, "CuPy", r"pip install 'lowshard\[cuda12\]'")
    refused(lambda: Binding.load(with_nccl=False), DependencyError, "CuPy")
    assert "CuPy" in str(why_unusable())


def test_importing_the_module_does_not_import_cupy() -> None:
    code = "import sys, lowshard.comm.nccl_over_mpi; assert not {'cupy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ranks_that_share_a_gpu_are_refused_unless_nccl_can_and_may() -> None:
    may = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert crowding(["0:1", "0:2"], 22809, {}) is None
    assert crowding(["0:1", "", ""], 22809, {}) is None  # what has no GPU has another error
    for version, environ in ((22809, may), (23007, {}), (23007, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})):
        assert "3 ranks of this node have 2 GPUs" in str(crowding(["0:1", "0:2", "0:1"], version, environ))
    assert "loaded: 2.28.9" in str(crowding(["0:1", "0:1"], 22809, may))
    assert crowding(["0:1", "0:1"], 23007, may) is None
