"""Which engine runs: the variable, what happens without Numba, arrays in several places, what is loaded when."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import lowshard
from lowshard import settings
from lowshard.errors import DependencyError, KernelError, LowshardError
from lowshard.kernels import cast, dequantize_mxfp8, engine, pack, quantize_mxfp8, sum_into, unpack
from lowshard.kernels.plain import PlainEngine

ROOT = Path(lowshard.__file__).parent.parent
NUMBA = importlib.util.find_spec("numba") is not None
with_numba = pytest.mark.skipif(not NUMBA, reason="numba is not installed")

# Every public call on NumPy arrays once, after the modules have been imported.
USE_ALL = """
import numpy as np
from lowshard import kernels as k
x = np.linspace(-3, 5, 128, dtype=np.float32).reshape(2, 64)
q = k.quantize_mxfp8(x)
table = k.BoxTable(x.shape, [((0, 2), (0, 32)), ((0, 1), (32, 64))])
k.unpack(k.pack(x, table), table, x.copy())
k.unpack_dequantize(k.pack_quantize(x, table), table, x.copy())
k.sum_into(k.cast(x, "bf16"), [x])
k.unswizzle_scales(k.swizzle_scales(q.scale), 2, 2)
values = k.dequantize_mxfp8(q, "float32")
"""


def python(code, choice=None, **variables):
    """Run code in a fresh interpreter of the checkout."""
    env = {k: v for k, v in os.environ.items() if k not in (settings.KERNELS.name, "PYTHONWARNINGS")}
    env.update(variables)
    if choice is not None:
        env[settings.KERNELS.name] = choice
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr


def chosen(monkeypatch, value):
    """The engine that a fresh process with this variable would take; the cache of this one is passed by."""
    if value is None:
        monkeypatch.delenv(settings.KERNELS.name, raising=False)
    else:
        monkeypatch.setenv(settings.KERNELS.name, value)
    return engine.host_engine.__wrapped__()


# ------------------------------------------------------------------------------------------- the variable
@with_numba
@pytest.mark.parametrize("value", [None, "", "numba"])
def test_numba_is_the_default(monkeypatch, value):
    assert chosen(monkeypatch, value).name == "numba"


def test_plain_is_taken_where_it_is_asked_for(monkeypatch):
    assert isinstance(chosen(monkeypatch, "plain"), PlainEngine)


@pytest.mark.parametrize("value", ["Plain", "cuda", " ", "numpy"])
def test_any_other_value_is_refused_by_name(monkeypatch, value):
    with pytest.raises(
        KernelError, match=f"LOWSHARD_KERNELS is numba or plain, got {value!r}: kernels for host arrays"
    ) as caught:
        chosen(monkeypatch, value)
    assert isinstance(caught.value, LowshardError)


# --------------------------------------------------------------------------------------- without Numba
# A module that is None in sys.modules raises ImportError, as one that is not installed does.
NO_NUMBA = "import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n"


def test_without_numba_the_plain_engine_runs_after_one_warning_and_gives_the_same_bytes():
    code = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        + "".join(f"    {line}\n" for line in (USE_ALL + "k.quantize_mxfp8(x)").strip().splitlines())
        + "from lowshard.kernels.engine import host_engine\n"
        "print(host_engine().name, len(caught), caught[0].category.__name__, values.tobytes().hex(), sep='|')\n"
        "print(caught[0].message)"
    )
    out, _ = python(NO_NUMBA + code)
    facts, message = out.split("\n", 1)
    name, count, category, values = facts.split("|")
    assert (name, count, category) == ("plain", "1", "RuntimeWarning")
    x = np.linspace(-3, 5, 128, dtype=np.float32).reshape(2, 64)
    assert values == dequantize_mxfp8(quantize_mxfp8(x), "float32").tobytes().hex()
    for part in ("Numba cannot be imported", "pip install numba", "LOWSHARD_KERNELS=plain", "same results"):
        assert part in message


def test_without_numba_asking_for_it_is_an_error_that_names_the_way_out():
    code = f"""{NO_NUMBA}
from lowshard.errors import DependencyError
from lowshard.kernels.engine import host_engine
try:
    host_engine()
except DependencyError as error:
    print(error)
"""
    out, _ = python(code, "numba")
    assert out.startswith("LOWSHARD_KERNELS=numba, but Numba cannot be imported (")
    assert out.endswith("pip install numba")
    assert issubclass(DependencyError, ImportError)


# --------------------------------------------------------------------------------- arrays in other places
class _Device:
    def __init__(self, number):
        self.id = number


class OnGpu:
    """What the checks ask of a CuPy array; it has no memory."""

    dtype = np.dtype(np.float32)
    shape, strides, size, ndim, nbytes = (2, 32), (128, 4), 64, 2, 256
    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, device=0, address=1 << 40):
        self.device, self.data = _Device(device), type("Memory", (), {"ptr": address})()

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("it must not be asked")


OnGpu.__module__ = "cupy"  # what a CuPy array is told by


HOST = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sum_into(HOST.copy(), [HOST, OnGpu()]),
        lambda: cast(HOST, "float32", out=OnGpu()),
        lambda: cast(OnGpu(), "float32", out=HOST.copy()),
        lambda: pack(HOST, [((0, 2), (0, 32))], out=_flat(OnGpu())),
        lambda: unpack(np.zeros(64, np.float32), [((0, 2), (0, 32))], OnGpu()),
        lambda: dequantize_mxfp8(quantize_mxfp8(HOST), "float32", out=OnGpu()),
    ],
)
def test_a_public_call_with_a_numpy_and_a_gpu_array_is_refused(call):
    with pytest.raises(KernelError, match="lie in one place"):
        call()


def _flat(array):
    array.shape, array.strides, array.ndim = (64,), (4,), 1
    return array


# ----------------------------------------------------------------------------------------------- imports
def test_importing_the_kernels_loads_no_optional_library():
    heavy = "numba cupy mpi4py yaml safetensors ml_dtypes matplotlib rich tokenizers"
    out, _ = python(
        f"import sys, lowshard.kernels; print([m for m in {heavy.split()!r} if m in sys.modules])"
    )
    assert out == "[]"


@pytest.mark.parametrize("choice", ["plain", pytest.param("numba", marks=with_numba)])
def test_work_on_numpy_arrays_imports_no_cupy_even_where_it_is_installed(choice, tmp_path):
    (tmp_path / "cupy.py").write_text("raise AssertionError('imported')\n")
    code = USE_ALL + (
        "import sys; from lowshard.kernels.engine import host_engine\n"
        "print('cupy' in sys.modules, host_engine().name)"
    )
    out, _ = python(code, choice, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert out == f"False {choice}"


def test_the_plain_engine_loads_no_numba():
    loaded = "import sys; print('numba' in sys.modules, 'lowshard.kernels.cpu' in sys.modules)"
    out, _ = python(USE_ALL + loaded, "plain")
    assert out == "False False"
