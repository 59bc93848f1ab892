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

from lowshard.compiled.elf import symbols_of

_METH_FASTCALL = 0x0080
_lock = threading.Lock()


@dataclass(frozen=True)
class Native:
    """A function in memory, for good.

    Attributes:
        address: of the function as C calls it.
        call: the function as Python calls it.
    """

    address: int
    call: Callable[..., Any]


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("text", ctypes.c_char_p),
    )


def python_symbol(name: str) -> str:
    """Return the name of the function that Python calls."""
    return f"{name}_py"


_methods: list[_Method] = []
"""What Python's function objects point to: never freed, as the code is not."""


def link(code: bytes, name: str) -> Native:
    """Put an object file into memory and return its function.

    Raises:
        ImportError: llvmlite is missing, or the code calls a function that this process does not have.
    """
    import llvmlite.binding as llvm

    with _lock:
        missing = []
        for called in symbols_of(code).called:
            try:
                # LLVM itself would end the process over a name that it does not find.
                llvm.add_symbol(called, ctypes.addressof(ctypes.c_char.in_dll(_process(), called)))
            except ValueError:
                missing.append(called)
        if missing:
            raise ImportError(
                f"compiled code {name} calls {', '.join(missing)}, which is not in this process"
            )
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
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@cache
def _process() -> ctypes.CDLL:
    """Return what stands for all names of this process: Python's own and those of the C library."""
    return ctypes.PyDLL(None)
