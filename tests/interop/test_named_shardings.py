"""Layouts of NamedShardings hold what JAX's devices hold, in a child process with 8 devices of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import mode

pytest.importorskip("jax", reason="jax is not installed: pip install jax")


@pytest.mark.time_limit(240)
def test_named_shardings_on_eight_devices() -> None:
    program = Path(__file__).with_name("run_named_shardings.py")
    count = "10000" if mode.full() else "400"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, str(program), count, str(mode.seed())],
        env=os.environ | flags, capture_output=True, text=True, timeout=2000 if mode.full() else 200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith(f"{count} NamedShardings and {count} layouts agree\n")
