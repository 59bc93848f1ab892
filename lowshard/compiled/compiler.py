"""Python functions compiled by Numba into object files that need nothing of Numba's: imported only where code is made.

Numba gives LLVM's text of the function; those that C and Python call are linked to it, and LLVM writes the object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import llvmlite.binding as llvm
from numba import carray, njit, types
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target

from lowshard.compiled import deferred
from lowshard.compiled.emitted import elements_at
from lowshard.compiled.level import chosen, target_level
from lowshard.compiled.native import Signature, python_symbol

_lock = threading.Lock()
"""One thread compiles at a time: ranks may be threads."""


def target() -> tuple[str, str, str]:
    """Return triple, processor and features that this process compiles for: its level's, if Numba is not in use yet."""
    level = target_level()
    if level is not None:
        config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.flags
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, cpu, features


def compile_object(
    name: str, make: Callable[[], Any], signature: Signature, error_model: str
) -> tuple[bytes, bool]:
    """Return an object file with a function, under its name as C calls it and under another as Python does.

    Beside it: whether it is for the level that this process compiles for, so that others may use it.
    """
    (triple, cpu, features), level = target(), target_level()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )
    with _lock, _text_alone() if chosen else nullcontext():
        deferred.take_up()
        function = make()
        function = function.real() if isinstance(function, deferred.Deferred) else function
        if not hasattr(function, "py_func"):
            function = njit(nogil=True, error_model=error_model)(function)
        entry, words = _entry(function, signature)
        integers = (types.int64,) * words
        compiled = njit(
            [getattr(types, signature.result)(*integers)],
            nogil=True, error_model=error_model, no_cpython_wrapper=True, no_cfunc_wrapper=True,
        )(entry)  # fmt: skip
        symbol = compiled.overloads[integers].fndesc.llvm_func_name
        module = llvm.parse_assembly(compiled.inspect_llvm(integers))
        module.link_in(llvm.parse_assembly(_callers(name, symbol, words, signature.result)))
        for symbol in (*module.functions, *module.global_variables):
            if not symbol.is_declaration and symbol.name not in (name, python_symbol(name)):
                symbol.linkage = "internal"
        return machine.emit_object(module), level is None or (cpu, features) == (level.cpu, level.flags)


class _Text(JITCodeLibrary):  # type: ignore[misc]
    """Numba's code of a function, of which no machine code is made."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 1  # nobody calls it

    def _finalize_specific(self) -> None: ...


@contextmanager
def _text_alone() -> Iterator[None]:
    """Keep Numba from making machine code of its own, some of the time, in a process that does nothing but compile."""
    codegen = cpu_target.target_context.codegen()
    codegen._library_class, codegen._add_module, codegen.set_env = _Text, lambda *_: None, lambda *_: None
    try:
        yield
    finally:
        del codegen._library_class, codegen._add_module, codegen.set_env


def _entry(target: Any, signature: Signature) -> tuple[Any, int]:
    """Return a function that takes int64 alone and calls the one to be compiled, and how many it takes."""
    names: dict[str, Any] = {"target": target, "carray": carray, "elements_at": elements_at}
    words, given = [], []
    for i, kind in enumerate(signature.args):
        words.append(f"a{i}")
        if "[" in kind:
            item, dims = kind.rstrip("]").split("[")
            names[item] = getattr(types, item)
            extents = [f"a{i}_{dim}" for dim in range(int(dims))]
            words += extents
            given.append(f"carray(elements_at(a{i}, {item}), ({', '.join(extents)},))")
        else:
            given.append(f"a{i} != 0" if kind == "bool" else f"a{i}")
    call = f"target({', '.join(given)})"
    text = f"def entry({', '.join(words)}):\n    {call if signature.result == 'void' else f'return {call}'}\n"
    exec(compile(text, "<entry>", "exec"), names)
    return names["entry"], len(words)


def _callers(name: str, symbol: str, words: int, result: str) -> str:
    """Return LLVM text of the function that C calls and the one that Python calls.

    Numba's takes the places of its result and of an error, and returns a status. No code of ours raises.
    """
    values = [f"i64 %a{i}" for i in range(words)]
    numbers = "\n".join(
        f"  %p{i} = getelementptr ptr, ptr %args, i64 {i}\n  %o{i} = load ptr, ptr %p{i}\n"
        f"  %a{i} = call i64 @PyLong_AsLongLong(ptr %o{i})\n"
        f"  %m{i} = icmp eq i64 %a{i}, -1\n  %f{i + 1} = or i1 %f{i}, %m{i}"
        for i in range(words)
    )
    back = {
        "int64": "call ptr @PyLong_FromLongLong(i64 %value)",
        "uint64": "call ptr @PyLong_FromUnsignedLongLong(i64 %value)",
        "void": "call ptr @Py_BuildValue(ptr @nothing)",
    }[result]
    return f"""
@nothing = private constant [1 x i8] zeroinitializer
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyLong_FromUnsignedLongLong(i64)
declare ptr @Py_BuildValue(ptr, ...)
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i32 @"{symbol}"(ptr, ptr{", i64" * words})

define void @NRT_MemInfo_call_dtor(ptr %owner) {{
  call void @llvm.trap()
  unreachable
}}
declare void @llvm.trap()

define i64 @"{name}"({", ".join(values)}) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  store ptr null, ptr %error
  %status = call i32 @"{symbol}"({", ".join(["ptr %result", "ptr %error", *values])})
  %value = load i64, ptr %result
  ret i64 %value
}}

define ptr @"{python_symbol(name)}"(ptr %self, ptr %args, i64 %count) {{
  %f0 = or i1 false, false
{numbers}
  br i1 %f{words}, label %ask, label %run
ask:
  %pending = call ptr @PyErr_Occurred()
  %good = icmp eq ptr %pending, null
  br i1 %good, label %run, label %fail
fail:
  ret ptr null
run:
  %state = call ptr @PyEval_SaveThread()
  %value = call i64 @"{name}"({", ".join(values)})
  call void @PyEval_RestoreThread(ptr %state)
  %made = {back}
  ret ptr %made
}}
"""
