"""What is kept for as long as the process lives: bounded in bytes, all of it, and said so in docs/limits.md."""

from __future__ import annotations

import ast
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

from support.sources import tree_of

from lowshard.bounded import MOST_BYTES, BoundedCache, bounded_cache, kept_in_self, size_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lowshard", "kernels", "launch", "bench")

# Caches without a bound of bytes, and what bounds them instead. One that is new is given a bound, or a line here.
CLOSED_ARGUMENTS = {
    "comm/build._heed_finalize": "one module", "comm/call._is_own": "256 files",
    "comm/nccl_wire.wire_of": "dtypes of the table", "comm/agreement._signature": "4,096 digests",
    "comm/node/combine.recipe_of": "dtypes and ops", "comm/node/combine._combiner": "dtypes and ops",
    "comm/node/combine._divider": "dtypes", "comm/node/combine._converter": "dtypes",
    "dtypes._numpy_dtype": "rows of the dtype table", "kernels/buffer.dtype_name": "dtypes of the table",
    "foreign_array.is_cupy": "256 types", "foreign_array._way_to_see": "256 types",
    "foreign_array._memory_of": "256 types",
    "kernels/cpu/drive.compiled": "kinds of kernels", "kernels/cpu/scales.swizzle_kernel": "two",
    "kernels/cpu/bit_digest.bit_digest_kernel": "bytes of a unit",
    "kernels/cpu/bit_digest.padded_weights": "bytes of a unit, units of a cache line",
    "kernels/cpu/cpu_changes.find_kernel": "widths", "kernels/cpu/cpu_changes.write_kernel": "widths",
    "kernels/cpu/cpu_optimizer.sgd_kernel": "modes of a step", "kernels/cuda/cuda_engine.device_engine": "GPUs",
    "kernels/cuda/cuda_changes.device_search": "GPUs",
    "kernels/cuda/cuda_engine._fold_tree": "numbers of sources, to 2,048",
    "kernels/cuda/cuda_engine._fold_rows": "the same",
    "kernels/cuda/cuda_module.source": "files of the package",
    "kernels/reference.value_table": "element formats, dtypes",
    "reading._struct": "readers and dataclasses", "reading._type": "annotations",
    "launch/mpiexec._probe_library": "8", "launch/mpiexec._probe_mpiexec": "32",
}  # fmt: skip
CLOSED_TABLES = {
    "bounded.MOST_BYTES": "caches",
    "comm/abort._installed": "hooks of the process",
    "comm/agreement._agreed_before": "live communicators, weakly",
    "comm/build._memories": "live communicators",
    "comm/build._watches": "live communicators",
    "comm/caller._callers": "live communicators, weakly",
    "comm/work._failures": "failed calls of which nobody was told",
    "comm/staged._kept": "the same", "transfer/pinned._kept": "slots that a failed GPU may write to",
    "comm/failure._channels": "groups of ranks", "comm/failure._hubs": "the same",
    "comm/failure._ending": "one flag", "comm/failure._from_launcher": "one",
    "compiled/loader.origins": "compiled functions", "compiled/native._methods": "compiled functions",
    "compiled/loader.quiet": "groups of functions", "compiled/store._said": "one line",
    "compiled/level.chosen": "one level",
    "op/op_part._GROUPS": "64 groups a live communicator", "op/op_part.KERNELS": "ops",
    "step_cost._PRICES": "16 profiles", "reading.READERS": "classes", "reading._BY_TYPE": "classes",
    "solver/table/op_rule.RULES": "ops",
    "kernels/cpu/drive._ROWS": "kinds of kernels",
}  # fmt: skip
CONTAINERS = {
    "dict", "list", "set", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "deque",
    "Counter",
}  # fmt: skip


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = (
                path.relative_to(ROOT / "lowshard" if folder == "lowshard" else ROOT)
                .with_suffix("")
                .as_posix()
            )
            yield name, tree_of(path)


def last_name(node: ast.expr) -> str:
    """Return the name that is called, without its module, its arguments and its type's parameters."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def cached_functions() -> set[str]:
    """Return functions with arguments whose results functools keeps."""
    return {
        f"{name}.{node.name}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and {last_name(d) for d in node.decorator_list} & {"cache", "lru_cache"}
        and (node.args.args or node.args.kwonlyargs or node.args.vararg)
    }


def growing_tables() -> set[str]:
    """Return what a module holds in a container that is empty at first."""
    found = set()
    for name, tree in modules():
        for node in tree.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = node.value
            empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value).strip("{}[]")
            called = isinstance(value, ast.Call) and last_name(value) in CONTAINERS and not value.args
            if empty or called:
                found.add(f"{name}.{ast.unparse(target)}")
    return found


def test_every_cache_of_the_process_has_a_bound() -> None:
    assert cached_functions() == CLOSED_ARGUMENTS.keys()
    assert growing_tables() == CLOSED_TABLES.keys()


def test_readme_has_every_bound() -> None:
    names = sorted(
        ".".join(("lowshard", *name.split("/")))
        .replace(".__init__", "")
        .replace("lowshard.bench", "lowshard.bench")
        for name, tree in modules()
        if any(isinstance(n, ast.ImportFrom) and n.module == "lowshard.bounded" for n in tree.body)
    )
    code = f"import importlib\nfor n in {names!r}: importlib.import_module(n)\n"
    code += "from lowshard.bounded import MOST_BYTES\nfor n, b in sorted(MOST_BYTES.items()): print(n, b, sep='|')"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    bounds = dict(line.split("|") for line in ran.stdout.splitlines())
    assert len(bounds) > 15
    table = (
        (ROOT / "docs" / "limits.md")
        .read_text(encoding="utf-8")
        .partition("## Memory that is kept")[2]
        .partition("\n## ")[0]
    )
    rows = [line for line in table.splitlines() if line.startswith("| `") or line.startswith("| ")]
    for name, most_bytes in bounds.items():
        amount = (
            f"{int(most_bytes) >> 10} KiB" if int(most_bytes) < 1 << 20 else f"{int(most_bytes) >> 20} MiB"
        )
        short = name.removeprefix("lowshard.")
        assert any(short in row and f"| {amount} |" in row for row in rows), (
            f"the table of docs/limits.md lacks {short}, {amount}"
        )


def test_the_newest_is_kept_up_to_the_bound_and_a_value_is_weighed_once_it_has_grown() -> None:
    kept = BoundedCache[int, list[int]](None, 100, lambda key, value: len(value))
    for key in range(50):
        value = kept.put(key, [])
        value.extend(range(10))  # what it makes on first use
    assert len(kept) == 11
    assert kept.used_bytes == 100
    assert kept.get(49) is not None
    assert kept.get(38) is None
    kept.put(49, [1])
    assert (len(kept), kept.used_bytes) == (11, 100)
    kept.put(50, [0] * 1000)
    kept.put(51, [])
    assert 50 not in kept  # larger than all there is room for
    kept.clear()
    assert (len(kept), kept.used_bytes) == (0, 0)


def test_a_function_forgets_beyond_its_bound_and_is_right_all_the_while() -> None:
    calls = []

    @bounded_cache(1 << 20)
    def squares(n: int) -> tuple[int, ...]:
        calls.append(n)
        return tuple(i * i for i in range(n, n + 100))

    tracemalloc.start()
    for n in range(6000):
        assert squares(n)[1] == (n + 1) ** 2
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 << 20, "it keeps more than its bound"
    before = len(calls)
    squares(5999)
    assert len(calls) == before
    assert MOST_BYTES.pop(f"{__name__}.{squares.__qualname__}") == 1 << 20


def test_sizes_are_those_of_what_is_held() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    value = {i + 9000: tuple(range(9000, 9010 + i % 7)) for i in range(1000)}  # small integers exist once
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * held < size_of(value) < 2 * held


def test_what_is_kept_in_an_object_is_worked_out_once_for_each_argument_and_goes_with_the_object() -> None:
    class Halves:
        def __init__(self) -> None:
            self.asked: list[int] = []

        @kept_in_self
        def half(self, n: int) -> list[int] | None:
            self.asked.append(n)
            return [n // 2] if n else None

    one, other = Halves(), Halves()
    assert one.half(4) is one.half(4)
    assert one.half(0) is None
    assert one.half(0) is None
    assert other.half(4) is not one.half(4)
    assert (one.asked, other.asked) == ([4, 0], [4])
    gone = weakref.ref(one)
    del one
    assert gone() is None
