"""Object files put into this process, and their functions as Python's.

An object has two functions for each name: the one that C calls, with int64 arguments, and beside it one in the form
that Python calls fastest (METH_FASTCALL, Python's C API, "Common Object Structures"): `compiler` makes both.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

PYTHON_NAMES = (
    "PyLong_AsLongLong", "PyLong_FromLongLong", "PyLong_FromUnsignedLongLong", "Py_BuildValue", "PyErr_Occurred",
    "PyEval_SaveThread", "PyEval_RestoreThread",
)  # fmt: skip
"""What the functions that Python calls take of Python itself."""
INT = "int64"
_METH_FASTCALL = 0x0080
_lock = threading.Lock()
_methods: list[_Method] = []
"""What Python's function objects point to: never freed, as the code is not."""


@dataclass(frozen=True)
class Signature:
    """What a compiled function takes ("int64", "bool", C-contiguous arrays such as "float32[1]") and returns."""

    args: tuple[str, ...]
    result: str = INT


@dataclass(frozen=True)
class Native:
    """A function in memory, for good: its address as C calls it, and the function as Python calls it."""

    address: int
    call: Callable[..., Any]


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("text", ctypes.c_char_p),
    )  # fmt: skip


def python_symbol(name: str) -> str:
    """Return the name of the function that Python calls."""
    return f"{name}_py"


def link(code: bytes, name: str) -> Native:
    """Put an object file into memory and return its function; an ImportError where llvmlite is missing."""
    import llvmlite.binding as llvm

    with _lock:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = engine.get_function_address(name)
        method = _Method(
            name.encode(), engine.get_function_address(python_symbol(name)), _METH_FASTCALL, None
        )
    _methods.append(method)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return Native(address, make(ctypes.addressof(method), None, None))


@cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in PYTHON_NAMES:  # of a libpython that a program has loaded for itself too
        llvm.add_symbol(name, ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, name)))
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
