"""Arrays of torch and JAX wherever an array is taken, in processes of their own; and without them none is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

HERE = Path(__file__).parent
FUNCTIONS = ("in_collectives", "seen_where_they_lie", "redistributed", "computed_with",
             "refitted_and_published", "saved_loaded_and_filled", "refused")  # fmt: skip
CASES = [f"{function} {library}" for function in FUNCTIONS for library in ("torch", "jax")]


def arguments() -> list[str]:
    """Return how many layouts to draw, which also says whether all dtypes are gone through; and the seed."""
    return ["200" if mode.full() else "20", str(mode.seed())]


@cache
def outcomes() -> dict[str, str]:
    """Run all cases once: to start torch and JAX takes longer than most of them."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, str(HERE / "run_arrays.py"), *arguments()],
        env=os.environ | flags, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout)
    return found


@pytest.fixture
def both_libraries() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    pytest.importorskip("jax", reason="jax is not installed: pip install jax")


@pytest.mark.time_limit(620)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("both_libraries")
def test_arrays_of_torch_and_jax(case: str) -> None:
    assert outcomes()[case] == ""
    assert sorted(outcomes()) == sorted(CASES)


@pytest.mark.mpi
@pytest.mark.time_limit(150)
@pytest.mark.parametrize("env", [{}, {"LOWSHARD_CPU_PATH": "mpi"}], ids=["memory", "mpi"])
@pytest.mark.usefixtures("both_libraries")
def test_collectives_on_mpi_ranks(env: dict[str, str]) -> None:
    assert start_ranks(HERE / "run_arrays_on_ranks.py", 2, arguments(), 140, env=env).ok().stdout == "right\n"


def test_no_library_is_loaded_where_no_array_of_it_came() -> None:
    program = """
import sys
import numpy as np
from lowshard import DeviceMesh, Layout, Replicated, Sharded, redistribute
from lowshard.comm import run_loopback
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8

def job(comm):
    comm.all_gather(bytearray(4), np.zeros(8, np.uint8))
    mesh = DeviceMesh((2,), ("tp",))
    src, dst = (Layout(mesh, (8,), "bfloat16", (p,)) for p in (Sharded(0), Replicated()))
    redistribute(np.zeros(4, src.numpy_dtype), src, dst, comm)
    try:
        comm.all_reduce([1.0], "text")
    except ValueError:
        pass

run_loopback(2, job)
dequantize_mxfp8(quantize_mxfp8(np.zeros((4, 32), np.float32)))
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "jax", "jaxlib", "cupy"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
