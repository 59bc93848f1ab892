"""Other libraries' transitions: each in processes of its own, beside a floor taken there, told as JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lowshard
from lowshard.settings import environment

_LIMIT_S = 900.0
PEERS = {"dtensor": ("torch", "PyTorch's DTensor"), "jax": ("jax", "JAX")}
"""By name: the package that must be there, and what people call it."""


def peer_rows(request: Any, ranks: int, pythons: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the peers print, a row a transition; a row {"missing": text} where one is not installed or fails."""
    rows: list[dict[str, Any]] = []
    for name, (package, title) in PEERS.items():
        python = next((p for p in pythons if _has(p, package)), None)
        if python is None:
            where = ", ".join(pythons)
            rows.append(
                {"peer": name, "missing": f"{title} is left out: no {package} for {where} (--peer-python)"}
            )
            continue
        print(f"lowshard bench redistribute: {title}", file=sys.stderr, flush=True)
        asked = json.dumps({**request, "ranks": ranks})
        try:
            ran = subprocess.run(
                [python, "-m", f"lowshard.bench.peer_{name}", asked],
                capture_output=True, text=True, timeout=_LIMIT_S, env=_environment(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            rows.append({"peer": name, "missing": f"{title} did not end within {_LIMIT_S:g} s"})
            continue
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            rows.append({"peer": name, "missing": f"{title} failed: {last}"})
        rows += [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return rows


def _environment() -> dict[str, str]:
    """Return an environment in which another interpreter finds this package, and which is not a rank's."""
    kept = {
        k: v
        for k, v in environment().items()
        if not k.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_"))
    }
    kept["PYTHONPATH"] = str(Path(lowshard.__file__).resolve().parents[1])
    return kept


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return (
            subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
        )
    except OSError:
        return False
