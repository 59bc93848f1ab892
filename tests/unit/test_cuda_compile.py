"""The CUDA sources compile for every GPU named here, spill no register, and become the right instructions.

Needs no GPU: NVRTC and nvdisasm come in wheels. What is compiled is what CuPy is given, with CuPy's options.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from support import mode

from lowshard.kernels.cuda.cuda_module import COMPILER_OPTIONS, SOURCES, source

ARCHES = (80, 86, 89, 90, 100, 103, 120)


def words(text: str) -> set[str]:
    """Return what a shell makes of words with braces."""
    split = [[part.split(",") for part in re.split("[{}]", word)] for word in text.split()]
    return {"".join(parts) for word in split for parts in product(*word)}


KERNELS = {
    "quantize": words("quantize_{bf16,f16,f32}_{e4m3,e5m2}_{linear,table,any}"),
    "dequantize": words("dequantize_{e4m3,e5m2}_{bf16,f16,f32}_{linear,table,any}"),
    "copy": words("copy_{1,2,4,8,16}"),
    "convert": words("cast_{bf16,f16,f32}_{bf16,f16,f32}_1 sum_mixed_{bf16,f16,f32}_{1,4}")
    | words("{cast,sum}_{bf16,f16}_{bf16,f16}_8 {cast,sum}_{f32_bf16,f32_f16,f32_f32,bf16_f32,f16_f32}_4"),
    "swizzle": words("{swizzle,unswizzle}_scales"),
    "changes": words("{differ,gather,scatter}_{1,2,4,8,16}"),
    "checksum": words("checksum_{start,add}"),
    "step": words("{adamw,sgd}_{1,4}"),
    "fold": words("fold_{bf16,f16,f32,i8,i16,i32,u8,u16,u32}_{1,4} fold_{f64,i64,u64}_{1,2}"),
}

# Kernels, the most registers of a thread, and the last GPU for which that holds. With 48, five CTAs of 256
# threads fit, by which the engine sizes its grids; with 64, four do.
REGISTERS = [
    (r"quantize_b?f16_\w+_(linear|table)|dequantize_\w+f16_\w+|copy_\d+|(adamw|sgd)_\d", 48, 90),
    (r"(sum|cast|dequantize)_\w+", 64, ARCHES[-1]),
]
# Kernels, the first GPU for which they have some instructions, and those. Loads from tables end in .CONSTANT.
ALWAYS, NEVER = 0, ARCHES[-1] + 1
LDG32, LDG64, LDG128 = (rf"LDG\.E(\.EF)?{width}" for width in ("", r"\.64", r"\.128"))
STG64, STG128 = r"STG\.E\.64", r"STG\.E\.128"
INSTRUCTIONS = [
    (r"\w+", NEVER, [r"(LDL|STL|LD|ST)(\.\S+)?"]),  # local memory and generic addresses are slow
    (r"copy_16|(adamw|sgd|fold_f32)_4|fold_.64_2|(cast|sum)_(f32_f32_4|\w+_8)", ALWAYS, [LDG128, STG128]),
    (r"quantize_\w+_(linear|table)|(cast|sum)_f32_b?f16_4", ALWAYS, [LDG128, STG64]),
    (r"quantize_\w+_(linear|table)", NEVER, [r"LDG\.E(\.EF)?\.[US]?(8|16)"]),
    (r"dequantize_\w+f16_(linear|table)|(cast|sum)_b?f16_f32_4", ALWAYS, [LDG64, STG128]),
    (r"dequantize_\w+_f32_(linear|table)", ALWAYS, [LDG32, STG128]),
    (r"quantize_\w+_e4m3_\w+", 89, [r"F2FP\.SATFINITE\.E4M3\.\S+"]),
    (r"quantize_\w+_e5m2_\w+", 89, [r"F2FP\.SATFINITE\.E5M2\.\S+"]),
    (r"quantize_b?f16_\w+", 90, [r"VIMNMX3?\.U16x2\S*"]),
    (r"dequantize_e4m3_\w+", 89, [r"F2FP\.F16\.E4M3\.UNPACK_B\S*"]),
    (r"checksum_add", ALWAYS, [LDG128, r"REDG?\.E\.ADD\.64\S*"]),
    (r"(un)?swizzle_scales", NEVER, [r"I2F\.U64\S*"]),  # of a division of 64 bits
    # Subnormals count, though CuPy has the compiler flush them: a fold does so twice, in its exact division.
    (r"sum_\w+", ALWAYS, [r"FADD"]),
    (r"sum_\w+", NEVER, [r"FADD\.FTZ\S*"]),
    (r"fold_(f32|b?f16)_\d", ALWAYS, [r"FADD", r"FMUL"]),
    (r"fold_(f32|b?f16)_\d", NEVER, [r"FMUL\.FTZ\S*", r"FADD\.FTZ(.* FADD\.FTZ\S*){2}"]),
]


def in_wheel(pattern: str) -> str | None:
    """Return a file of NVIDIA's wheels, whose folders are nvidia/cu13 say."""
    return next((str(path) for place in sys.path for path in Path(place).glob(f"nvidia/*/{pattern}")), None)


NVRTC = in_wheel("lib/libnvrtc.so.*") or find_library("nvrtc")
DISASSEMBLER = shutil.which("nvdisasm") or in_wheel("bin/nvdisasm")
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="NVRTC is not there (nvidia-cuda-nvrtc)")
# A default run has one GPU and one source; fold takes as long as all others together.
NAMES = [name for name in SOURCES if mode.full() or name != "fold"]
CASES = list(product(mode.sample(ARCHES, 1, "arch"), mode.sample(NAMES, 1, "sources")))
every_case = pytest.mark.parametrize(("arch", "name"), CASES)


@cache
def compiled(arch: int, name: str) -> tuple[str, bytes]:
    """Return what NVRTC and ptxas said, and the cubin."""
    options = [*COMPILER_OPTIONS, "-ftz=true", f"-arch=sm_{arch}", "--ptxas-options=-v"]
    library, program, text = ctypes.CDLL(NVRTC), ctypes.c_void_p(), source(name).encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None) == 0

    def made(what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw

    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), array)
    log = made("ProgramLog").rstrip(b"\0").decode()
    assert status == 0, log
    cubin = made("CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return log, cubin


def test_each_row_of_a_table_is_about_a_kernel() -> None:
    for which, *_ in (*REGISTERS, *INSTRUCTIONS):
        assert any(re.fullmatch(which, kernel) for kernel in set().union(*KERNELS.values())), which


@needs_nvrtc
@every_case
def test_a_source_compiles_without_warnings_and_spills_nothing(arch: int, name: str) -> None:
    log, _ = compiled(arch, name)
    assert "warning" not in log.lower()
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes"
    found = re.findall(rf"Compiling entry function '(\w+)'.*?{sizes}.*?Used (\d+) reg", log, re.DOTALL)
    assert {kernel for kernel, *_ in found} == KERNELS[name]
    for kernel, *memory, used in found:
        assert memory == ["0", "0", "0"], f"{kernel}: stack frame, spill stores and loads of {memory} bytes"
        for which, most, last in REGISTERS:
            assert arch > last or int(used) <= most or not re.fullmatch(which, kernel), kernel


@needs_nvrtc
@pytest.mark.skipif(DISASSEMBLER is None, reason="no nvdisasm (nvidia-cuda-nvdisasm)")
@every_case
def test_kernels_become_the_instructions_they_are_for(arch: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "cubin").write_bytes(compiled(arch, name)[1])
    command = [str(DISASSEMBLER), "-c", str(tmp_path / "cubin")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    # A load through L1 is written with .STRONG.SM; operands are left out.
    _, *parts = re.split(r"^\s*\.text\.(\w+):", text.replace(".STRONG.SM", ""), flags=re.MULTILINE)
    assert set(parts[::2]) == KERNELS[name]
    for kernel, part in zip(parts[::2], parts[1::2], strict=True):
        line = " ".join(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", part))
        for which, first, patterns in INSTRUCTIONS:
            for pattern in patterns if re.fullmatch(which, kernel) else ():
                has = re.search(rf"(?<!\S)({pattern})(?!\S)", line) is not None
                assert has == (arch >= first), f"{kernel}: {pattern}"
