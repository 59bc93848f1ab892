"""Compiled once for a machine: the cache on disk shared, missing, broken; other CPUs; changed sources.

Each case runs in processes of its own, since a process keeps what it has compiled.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import mode

import lowshard

pytest.importorskip("numba", reason="numba is not there to be imported")

from lowshard.kernels.cpu.cpu_engine import vector_bits

LIMIT_S = 300.0
PACKAGE = Path(lowshard.__file__).parent
KERNELS = next(Path(path) / "kernels" for path in lowshard.__path__ if (Path(path) / "kernels").is_dir())

# Runs the jobs given as arguments and prints a line of JSON: for each whether the bytes are those of plain NumPy, and
# what its kernel was: from the cache, compiled, kept in memory alone.
WORK = """
import json, sys
import numpy as np, ml_dtypes
from lowshard.kernels import BoxTable, MXFP8Tensor, cast, dequantize_mxfp8, engine, pack, quantize_mxfp8, unpack
from lowshard.kernels.cpu import cpu_engine as cpu
from lowshard.kernels.plain import PlainEngine
from lowshard.compiled import origins

rng = np.random.default_rng(1)
codes, scale = rng.integers(0, 256, (9, 160), dtype=np.uint8), rng.integers(0, 256, (9, 5), dtype=np.uint8)
table = BoxTable((9, 160), [((r, r + 1), (r, r + 70 + 5 * r)) for r in range(9)])

def values(dtype):
    wide = rng.standard_normal((9, 160)) * np.exp2(rng.integers(-9, 9, (9, 160)))
    wide[2, 7], wide[3, 64:96], wide[4, 32] = np.nan, 0, np.inf
    return wide.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

def run(job):
    name, *words = job.split(" ")
    if name == "gather":
        return pack(codes, table).tobytes()
    if name == "scatter":
        out = np.zeros_like(codes)
        return unpack(np.resize(codes, table.total_elems), table, out).tobytes()
    if name == "quantize":
        q = quantize_mxfp8(x[words[0]], words[1])
        # Long enough for whole pieces, to codes that begin amid a line.
        many, room = np.resize(x[words[0]], 17 << 10), np.zeros((17 << 10) + 80, np.uint8)
        begin = -room.ctypes.data % 64 + 16
        far = MXFP8Tensor(room[begin : begin + many.size], np.zeros(many.size // 32, np.uint8), words[1])
        quantize_mxfp8(many, words[1], out=far)
        return b"".join(part.tobytes() for part in (q.data, q.scale, room[begin : begin + many.size], far.scale))
    if name == "dequantize":
        room = np.zeros(codes.size * x[words[0]].itemsize + 80, np.uint8)
        begin = -room.ctypes.data % 64 + 16
        out = room[begin : begin + codes.size * x[words[0]].itemsize].view(x[words[0]].dtype).reshape(codes.shape)
        return dequantize_mxfp8(MXFP8Tensor(codes, scale, words[1]), words[0], out=out).tobytes()
    return cast(x[words[0]], words[1]).tobytes()

x = {dtype: values(dtype) for dtype in ("bfloat16", "float16", "float32")}
made = {}
# AFTER_IMPORT
for job in sys.argv[1:]:
    numba_engine = cpu.NumbaEngine()
    numba_engine.stream_from_bytes = 0
    engine.host_engine = lambda: numba_engine
    before = set(origins)
    got = run(job)
    engine.host_engine = PlainEngine
    (name,) = set(origins) - before
    made[job] = dict(right=got == run(job), origin=origins[name])
numba = "numba" in sys.modules
print(json.dumps(dict(jobs=made, numba=numba, bits=cpu.vector_bits())))
"""

QUANTIZE = [f"quantize {source} e4m3" for source in ("bfloat16", "float16", "float32")]
OTHERS = [
    "dequantize bfloat16 e4m3", "dequantize float16 e5m2", "dequantize float32 e4m3", "cast float16 float32",
    "cast float32 bfloat16", "gather", "scatter",
]  # fmt: skip


def started(cache, jobs, before="", **variables):
    """Start a process that does the jobs, with code of the test's own run before them."""
    places = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LOWSHARD_KERNELS"))}
    environment |= {
        "NUMBA_CACHE_DIR": str(cache),
        "LOWSHARD_SHIPPED_CODE": "off",
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(places),
    }
    environment |= variables
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WORK.replace("# AFTER_IMPORT", before), *jobs],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process):
    with process:
        try:
            text = process.communicate("go\n", timeout=LIMIT_S)[0]
        finally:
            process.kill()
    assert process.returncode == 0
    return json.loads(text.splitlines()[-1])


def done(cache, jobs, before="", **variables):
    return finished(started(cache, jobs, before, **variables))


def facts(result, *names):
    """Return some of what is known of each job."""
    return [{name: job[name] for name in names} for job in result["jobs"].values()]


def files(cache):
    return sorted(Path(cache).rglob("*.o"))


def uses_zmm(cache, name):
    """Say whether the code kept for a name has an instruction on 512-bit registers."""
    return "zmm" in disassembly(cache, name)


def disassembly(cache, name):
    """Return the instructions of the code kept for a name."""
    (path,) = [path for path in files(cache) if path.stem.startswith(name)]
    code = cache / "code.o"
    code.write_bytes(path.read_bytes()[32:])
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("there is no objdump")
    text = subprocess.run([disassembler, "-d", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    code.unlink()
    assert "mov" in text
    return text


@pytest.mark.full_only
def test_of_several_processes_at_once_one_compiles_and_a_later_one_imports_no_numba(tmp_path):
    before = "print('ready', flush=True)\nsys.stdin.readline()"
    processes = [started(tmp_path, ["gather"], before) for _ in range(4 if mode.full() else 2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = sorted(facts(result, "origin")[0]["origin"] for result in results)
    assert found == ["compiled", *["disk"] * (len(processes) - 1)]
    assert all(result["jobs"]["gather"]["right"] for result in results)
    kept = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    assert len(kept) == 1
    later = done(tmp_path, ["gather"])
    assert facts(later, "right", "origin") == [{"right": True, "origin": "disk"}]
    compiler = next(result for result in results if result["jobs"]["gather"]["origin"] == "compiled")
    assert (compiler["numba"], later["numba"]) == (True, False)
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path)} == kept
    assert compiler["bits"] == later["bits"] == vector_bits()


NO_ROOM = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))"


@pytest.mark.full_only
def test_a_cache_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    result = done(tmp_path / "file" / "cache", ["dequantize bfloat16 e4m3"])
    assert facts(result, "right", "origin") == [{"right": True, "origin": "memory"}]


@pytest.mark.full_only
def test_a_disk_without_room_is_no_error(tmp_path):
    result = done(tmp_path, ["scatter"], NO_ROOM)
    assert facts(result, "right", "origin") == [{"right": True, "origin": "memory"}]
    (lock,) = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert lock.startswith("lock")
    again = done(tmp_path, ["scatter"])
    assert facts(again, "right", "origin") == [{"right": True, "origin": "compiled"}]


@pytest.mark.full_only
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the CPUs named here are x86-64")
@pytest.mark.parametrize(
    ("cpu", "bits"), mode.sample([("x86-64", 128), ("haswell", 256), ("skylake-avx512", 512)], 1, "CPUs")
)
def test_code_for_smaller_cpus_gives_the_same_bytes(tmp_path, cpu, bits):
    if vector_bits() < bits:
        pytest.skip(f"this machine has no registers of {bits} bits")
    jobs = mode.sample(QUANTIZE, 1, f"{cpu} quantize") + mode.sample(OTHERS, 2, f"{cpu} others")
    # Without features of its own a CPU has those of its name, and not this machine's.
    result = done(tmp_path, jobs, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="")
    assert result["bits"] == bits
    assert facts(result, "right", "origin") == [{"right": True, "origin": "compiled"}] * len(jobs)
    assert uses_zmm(tmp_path, jobs[0].replace(" ", "_")) == (bits == 512)


DIGESTS = """
import json, sys
from pathlib import Path
from lowshard.kernels.cpu import drive
from lowshard.kernels.cpu.gather import gather_kernel
from lowshard.compiled import origins

kernels = Path(drive.__file__).parent.parent
before = drive.source_digest()
gather_kernel()
found = {"named": [name for name in origins if before in name] == [*origins], "same": [], "at": str(kernels)}
for path in sorted(kernels.rglob("*.py")):
    text = path.read_bytes()
    path.write_bytes(text + b"# changed\\n")
    drive.source_digest.cache_clear()
    if drive.source_digest() == before:
        found["same"].append(path.relative_to(kernels).as_posix())
    path.write_bytes(text)
drive.source_digest.cache_clear()
found["back"] = drive.source_digest() == before
print(json.dumps(found))
"""


@pytest.mark.full_only
def test_a_change_in_any_source_that_code_is_made_from_gives_kernels_a_new_name(tmp_path):
    for folder in {PACKAGE, KERNELS}:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, tmp_path / folder.relative_to(PACKAGE.parent), ignore=ignored)
    kernels = tmp_path / KERNELS.relative_to(PACKAGE.parent)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    made = subprocess.run(
        [sys.executable, "-c", DIGESTS], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        timeout=LIMIT_S, check=True,
    )  # fmt: skip
    found = json.loads(made.stdout)
    assert (Path(found["at"]), found["named"], found["back"]) == (kernels, True, True)
    assert found["same"]  # the public calls, the CUDA side
    assert not [name for name in found["same"] if name.startswith("cpu/")]
    assert not {"reference.py", "runs.py"} & {*found["same"]}
