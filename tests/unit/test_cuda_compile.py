"""The CUDA sources compile for every GPU named here, spill no register, and become the right instructions.

Needs no GPU: NVRTC from its wheel, and nvdisasm for the instructions. What is compiled is the text that CuPy is given,
under the options that CuPy adds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
from support import mode

from lowshard.kernels.cuda.cuda_module import COMPILER_OPTIONS, SOURCES, program_of, source

ARCHES, MAIN_ARCH = (80, 86, 89, 90, 100, 103, 120), 90
FLOATS, ELEMS, FORMS = ("bf16", "f16", "f32"), ("e4m3", "e5m2"), ("linear", "table", "any")
INTEGERS = [f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64)]
KERNELS = {
    "quantize": {f"quantize_{x}_{e}_{form}" for x, e, form in product(FLOATS, ELEMS, FORMS)},
    "dequantize": {f"dequantize_{e}_{x}_{form}" for x, e, form in product(FLOATS, ELEMS, FORMS)},
    "copy": {f"copy_{size}" for size in (1, 2, 4, 8, 16)},
    "convert": {
        *(f"cast_{a}_{b}_{n}" for a, b in product(FLOATS, FLOATS) for n in (1, 4 if "f32" in (a, b) else 8)),
        *(f"sum_{a}_{b}_{4 if 'f32' in (a, b) else 8}" for a, b in product(FLOATS, FLOATS)),
        *(f"sum_mixed_{b}_{n}" for b, n in product(FLOATS, (1, 4))),
    },
    "swizzle": {"swizzle_scales", "unswizzle_scales"},
    "changes": {f"{name}_{size}" for name in ("differ", "gather", "scatter") for size in (1, 2, 4, 8, 16)},
    "checksum": {"checksum_start", "checksum_add"},
    "step": {"adamw_1", "adamw_4", "sgd_1", "sgd_4"},
    "fold": {f"fold_{kind}_{count}" for kind in ("f64", *FLOATS, *ELEMS, *INTEGERS)
             for count in (1, 2 if "64" in kind else 4)},
}  # fmt: skip


@cache
def in_wheels(pattern: str) -> list[str]:
    """Return files of NVIDIA's wheels, whose folders are nvidia/cu13 say."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    return [str(path) for place in places for path in sorted(Path(place).glob(f"*/{pattern}"))]


DISASSEMBLER = shutil.which("nvdisasm") or next(iter(in_wheels("bin/nvdisasm")), None)


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC from a wheel, or from where the system keeps libraries."""
    for name in (*in_wheels("lib/libnvrtc.so.*"), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def compiled(arch: int, name: str) -> tuple[str, bytes]:
    """Return what NVRTC and ptxas said, and the cubin."""
    options = [*COMPILER_OPTIONS, "-ftz=true", f"-arch=sm_{arch}", "--ptxas-options=-v"]
    library, program, text = nvrtc(), ctypes.c_void_p(), source(name).encode()
    assert library is not None
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None) == 0

    def made(what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw

    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        log = made("ProgramLog").rstrip(b"\0").decode()
        assert status == 0, log
        return log, made("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def registers(log: str) -> dict[str, int]:
    """Return registers a thread of each kernel in a ptxas log; assert that none is spilled."""
    found = {}
    spills = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes"
    pattern = rf"Compiling entry function '(\w+)'.*?{spills}.*?Used (\d+) reg"
    for name, *memory, used in re.findall(pattern, log, re.DOTALL):
        assert memory == ["0", "0", "0"], f"{name}: stack frame, spill stores and loads of {memory} bytes"
        found[name] = int(used)
    return found


@cache
def instructions(arch: int, name: str) -> dict[str, list[str]]:
    """Return the instructions of each kernel in order, operands left out."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(arch, name)[1])
        file.flush()
        command = [str(DISASSEMBLER), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    found: dict[str, list[str]] = {}
    here: list[str] = []
    for line in text.splitlines():
        if start := re.match(r"\s*\.text\.(\w+):", line):
            here = found.setdefault(start[1], [])
        elif word := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", line):
            here.append(word[1].replace(".STRONG.SM", ""))  # how a load through L1 (ld.ca) is written
    return found


# A default run has one of the GPUs and one source; fold takes as long as all others together.
CASES = [
    (arch, name)
    for arch in mode.sample(ARCHES, 1, "arch")
    for name in mode.sample([name for name in SOURCES if mode.full() or name != "fold"], 1, f"sources {arch}")
]
every_case = pytest.mark.parametrize(("arch", "name"), CASES)
needs_nvrtc = pytest.mark.skipif(nvrtc() is None, reason="NVRTC is not there (nvidia-cuda-nvrtc)")
needs_nvdisasm = pytest.mark.skipif(DISASSEMBLER is None, reason="no nvdisasm (nvidia-cuda-nvdisasm)")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_of_a_long_file_is_compiled_alone(name: str) -> None:
    for kernel in mode.sample(sorted(KERNELS[name]), 2, f"alone {name}"):
        file, options = program_of(kernel)
        assert file == name
        command = ["g++", "-E", "-P", "-x", "c++", *options, "-"]
        text = subprocess.run(command, input=source(name), capture_output=True, text=True, check=True).stdout
        found = re.findall(r'extern "C".*?(\w+)\(u64', text, re.DOTALL)
        assert found == [kernel] or (kernel in found and len(found) <= 15 and len(KERNELS[name]) <= 15)


@needs_nvrtc
@every_case
def test_a_source_compiles_without_warnings_and_spills_nothing(arch: int, name: str) -> None:
    log, cubin = compiled(arch, name)
    assert "warning" not in log.lower()
    assert cubin[:4] == b"\x7fELF"
    used = registers(log)
    assert set(used) == KERNELS[name]
    # Five CTAs of 256 threads fit: the engine sizes its grids by it, and so many loads keep memory busy.
    of_five = r"quantize_b?f16_\w+_(linear|table)|dequantize_\w+f16|copy|adamw|sgd"
    for kernel, count in used.items():
        assert count <= 48 or arch > MAIN_ARCH or not re.search(of_five, kernel), kernel
        assert count <= 64 or not kernel.startswith(("sum", "cast", "dequantize")), kernel  # four CTAs


def has_word(words: Sequence[str], *patterns: str) -> bool:
    return all(any(re.fullmatch(pattern, word) for word in words) for pattern in patterns)


@needs_nvrtc
@needs_nvdisasm
@every_case
def test_kernels_become_the_instructions_they_are_for(arch: int, name: str) -> None:
    found = instructions(arch, name)
    assert set(found) == KERNELS[name]
    for kernel, words in found.items():
        has = partial(has_word, words)
        loads = [i for i, word in enumerate(words) if word.startswith("LDG")]
        stores = [i for i, word in enumerate(words) if word.startswith("STG")]
        # Local memory and generic addresses would be slow.
        assert not has(r"(LDL|STL|LD|ST)(\.\S+)?"), kernel
        wide = r"LDG\.E(\.\w+)*\.128"
        if kernel.startswith("quantize"):
            elem = kernel.split("_")[2].upper()
            assert has(rf"F2FP\.SATFINITE\.{elem}\.\S+") == (arch >= 89), kernel
            if "f32" not in kernel:
                assert has(r"VIMNMX3?\.U16x2(\.\S+)?") == (arch >= 90), kernel
            if not kernel.endswith("any"):
                assert has(wide, r"STG\.E\.64"), kernel
                assert not has(r"LDG\.E(\.EF)?\.[US]?(8|16)"), kernel
                first = next(i for i, word in enumerate(words) if word.startswith("SHFL.BFLY"))
                early = [words[i] for i in loads if i < first and "CONSTANT" not in words[i]]
                assert sum(bool(re.fullmatch(wide, word)) for word in early) >= (
                    8 if "f32" in kernel else 4
                ), kernel
        elif kernel.startswith("dequantize"):
            if "e4m3" in kernel:
                assert has(r"F2FP\.F16\.E4M3\.UNPACK_B\S*") == (arch >= 89), kernel
            if not kernel.endswith("any"):
                # A lane's share of a block: 4 codes that become 16 bytes, or 8; all of its shares are under way.
                codes, shares = (r"LDG\.E(\.EF)?", 8) if "f32" in kernel else (r"LDG\.E(\.EF)?\.64", 4)
                before = words[: words.index("STG.E.128")]
                assert sum(bool(re.fullmatch(codes, word)) for word in before) >= shares, kernel
        elif re.fullmatch(r"fold_(f32|b?f16|e4m3|e5m2)_\d", kernel):
            assert has("FADD", "FMUL"), kernel
            # What is flushed is within the exact division, which takes numbers apart before.
            assert not has(r"FMUL\.FTZ\S*"), kernel
            assert sum(word.startswith("FADD.FTZ") for word in words) <= 2, kernel
        elif kernel.startswith("sum"):  # subnormals count, though CuPy has the compiler flush them
            assert has("FADD"), kernel
            assert not has(r"FADD\.FTZ\S*"), kernel
            # What out holds and eight sources are under way before the first is needed; mixed ones have a load for each
            # width. Single bytes are what lies on no boundary.
            before = " ".join(words[: words.index("FADD")])
            wanted = 17 if "mixed" in kernel else 9
            assert len(re.findall(r"LDG\.E(?!\S*(CONSTANT|U8))", before)) >= wanted, kernel
            assert not has_word(before.split(), r"LDG\.E(\.EF)?(\.U(8|16))?") or kernel.endswith("_1"), kernel
        elif kernel.startswith("cast") and not kernel.endswith("_1"):
            # Somewhere the loads of a turn follow each other, with no conversion, store or branch between them.
            _, src, dst, unit = kernel.split("_")
            width, turn = (".64" if src != "f32" and dst == "f32" else ".128"), (2 if unit == "8" else 4)
            places = [i for i in loads if "CONSTANT" not in words[i]]
            between = r"\b(STG|BRA|BSSY|HADD2|F2F\w*|PRMT|SHFL)\b"
            groups = [places[k : k + turn] for k in range(len(places) - turn + 1)]
            whole = [group for group in groups if all(words[i].endswith(width) for i in group)]
            assert not all(re.search(between, " ".join(words[group[0] : group[-1]])) for group in whole), (
                kernel
            )
            assert has(r"STG\.E\.64" if src == "f32" and dst != "f32" else r"STG\.E\.128"), kernel
        elif name == "step":
            # All arrays are read before the first operation; the buffer of sgd is read on a way of its own.
            first = next(i for i, word in enumerate(words) if re.match(r"F(ADD|MUL|FMA)|MUFU", word))
            vectors = ".128" if kernel.endswith("_4") else ""
            early = [word for word in words[:first] if re.fullmatch(rf"LDG\.E(\.EF)?{vectors}", word)]
            assert len(early) >= (4 if "adamw" in kernel else 2), kernel
            assert has(rf"STG\.E{vectors}"), kernel
        if kernel == "checksum_add":
            assert sum(bool(re.fullmatch(wide, word)) for word in words) >= 8, kernel
            assert has(r"REDG?\.E\.ADD\.64\S*"), kernel
        if "swizzle" in kernel:
            assert len(loads) >= 4, kernel
            assert max(loads) < min(stores), f"{kernel}: a turn reads all before it writes"
            assert not has(r"I2F\.U64\S*"), f"{kernel}: 64-bit division"
        if kernel.startswith(("copy", "cast")):
            # The search for the box of a unit takes a step for two units at once: each reads 64 bits, of which some
            # compilers make two loads. So does the look-up before it, of two numbers of 32 bits each.
            blocks = [block for block in " ".join(words).split(" BRA ") if ".128.CONSTANT" not in block]
            halves = [2 * part.count("LDG.E.64.CONSTANT") + part.count("LDG.E.CONSTANT") for part in blocks]
            assert sum(count >= 4 for count in halves) >= 2, kernel
        if kernel in ("copy_16", "sum_f32_f32_4", "fold_f32_4", "fold_f64_2", "fold_i64_2", "fold_u64_2"):
            assert has(wide, r"STG\.E\.128"), kernel
