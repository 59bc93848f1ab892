"""The floors of the design, read from the imports: a module uses only lower floors, or its own without a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from support.sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "lowshard": ROOT / "lowshard",
    **{f"lowshard.{n}": ROOT / n for n in ("kernels", "launch", "bench")},
}

# Module or package -> floor. A package's own line covers its modules. 0k and 0c stand beside the floors
# above 0 and below 4: they use 0 alone.
FLOORS: dict[str, str] = {
    "lowshard._version": "0",
    "lowshard.errors": "0",
    "lowshard.argument": "0",
    "lowshard.document": "0",
    "lowshard.dtypes": "0",
    "lowshard.block_format": "0",
    "lowshard.bounded": "0",
    "lowshard.box": "0",
    "lowshard.reading": "0",
    "lowshard.content_hash": "0",
    "lowshard.nearest": "0",
    "lowshard.plain_console": "0",
    "lowshard.command_line": "0",
    "lowshard.settings": "0",
    "lowshard.gpu_stream": "0",
    "lowshard.foreign_array": "0",
    "lowshard.compiled": "0",
    "lowshard.mesh": "1",
    "lowshard.placement": "1",
    "lowshard.layout": "1",
    "lowshard.tiling": "1",
    "lowshard.kernels": "0k",
    "lowshard.comm": "0c",
    "lowshard.cost": "2",
    "lowshard.step_cost": "2",
    "lowshard.exchange": "3",
    "lowshard.step_search": "3",
    "lowshard.rules": "2",
    "lowshard.rules.rules_command": "7",
    "lowshard.redistribute_plan": "3",
    "lowshard.solver": "3",
    "lowshard.solver.solve_command": "7",
    "lowshard.pool": "4",
    "lowshard.transfer": "4",
    "lowshard.reshard": "5",
    "lowshard.reshard.dim_sharding": "3",
    "lowshard.reshard.rank_grid": "3",
    "lowshard.reshard.partition": "3",
    "lowshard.reshard.tensor_layout": "3",
    "lowshard.reshard.parameter_record": "3",
    "lowshard.reshard.replica_shares": "3",
    "lowshard.reshard.reshard_move": "3",
    "lowshard.reshard.move_schedule": "3",
    "lowshard.reshard.reshard_plan": "3",
    "lowshard.reshard.plan_builder": "3",
    "lowshard.reshard.model_tables": "3",
    "lowshard.reshard.scale_slice": "3",
    "lowshard.reshard.cache_layouts": "3",
    "lowshard.reshard.content_digest": "4",
    "lowshard.reshard.published_tensors": "4",
    "lowshard.reshard.rank_side": "4",
    "lowshard.reshard.reshard_run": "4",
    "lowshard.reshard.mxfp8_transform": "4",
    "lowshard.reshard.version_changes": "4",
    "lowshard.reshard.vote": "4",
    "lowshard.reshard.atomic_word": "4",
    "lowshard.reshard.refit": "5",
    "lowshard.execute": "4",
    "lowshard.op": "4",
    "lowshard": "4",
    "lowshard.checkpoint": "5",
    "lowshard.checkpoint.inspect_command": "7",
    "lowshard.weights": "5",
    "lowshard.weights.reshard_command": "7",
    "lowshard.fsdp": "5",
    "lowshard.launch": "6",
    "lowshard.launch.__main__": "7",
    "lowshard.interop": "7",
    "lowshard.bench": "7",
    "lowshard.demo": "7",
    "lowshard.selftest": "7",
    "lowshard.warmup": "7",
    "lowshard.cli": "7",
    "lowshard.__main__": "7",
}
BELOW: dict[str, set[str]] = {
    "0": {"0"},
    "0k": {"0", "0k"},
    "0c": {"0", "0k", "0c"},
    "1": {"0", "1"},
    "2": {"0", "1", "2"},
    "3": {"0", "1", "2", "3"},
    "4": {"0", "1", "2", "3", "0k", "0c", "4"},
    "5": {"0", "1", "2", "3", "0k", "0c", "4", "5"},
    "6": {"0", "0c", "6"},
    "7": {"0", "1", "2", "3", "0k", "0c", "4", "5", "6", "7"},
}
# Packages that are code for one library from end to end import it at the top. Nobody imports them at the top.
MADE_FOR = {
    "lowshard.compiled.compiler": {"numba", "llvmlite"},
    "lowshard.compiled.emitted": {"llvmlite"},
    "lowshard.kernels.cpu": {"llvmlite"},
    "lowshard.comm.node": {"llvmlite", "mpi4py"},
    "lowshard.transfer.cross_memory": {"llvmlite", "mpi4py"},  # by way of lowshard.comm.node
    "lowshard.reshard.atomic_word": {"llvmlite"},
}
HEAVY = (
    "cupy",
    "numba",
    "llvmlite",
    "mpi4py",
    "yaml",
    "safetensors",
    "isal",
    "msgspec",
    "rich",
    "matplotlib",
    "tokenizers",
    "ml_dtypes",
    "scipy",
    "torch",
    "jax",
)


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            found[name] = path
    return found


MODULES = modules()


def floor_of(name: str) -> str:
    while name not in FLOORS:
        name = name.rpartition(".")[0]
        assert name, "a module outside the table"
    return FLOORS[name]


@cache
def imports_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules that a file imports: anywhere, and at its top, where the import runs when it is loaded."""
    anywhere: set[str] = set()
    at_top: set[str] = set()

    def visit(node: ast.AST, later: bool) -> None:
        if isinstance(node, ast.Import):
            names = {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {name if name in MODULES else node.module for name in whole}
        else:
            later = later or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            later = later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            if not isinstance(node, ast.expr):
                for inner in ast.iter_child_nodes(node):
                    visit(inner, later)
            return
        anywhere.update(names)
        if not later:
            at_top.update(names)

    visit(tree_of(path), False)
    return frozenset(anywhere), frozenset(at_top)


def test_the_table_names_every_module_by_itself_or_by_its_package() -> None:
    for name in MODULES:
        if name.count(".") == 1 and MODULES[name].name != "__init__.py":
            assert name in FLOORS, f"{name} is on no floor: give it one"
        floor_of(name)
    assert set(FLOORS) <= set(MODULES), "the table names a module that is not there"


def test_a_module_imports_only_from_lower_floors() -> None:
    # `from lowshard import Layout` asks the package, which offers names of floors 0 to 4.
    wrong = [
        f"{name} (floor {floor_of(name)}) imports {used} (floor {floor_of(used)})"
        for name, path in sorted(MODULES.items())
        for used in imports_of(path)[0]
        if used.startswith("lowshard") and floor_of(used) not in BELOW[floor_of(name)]
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    """Neither at start-up nor later, in a function or for type checkers."""
    graph = {name: {u for u in imports_of(path)[0] if u in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name in done:
            return
        for used in graph[name] - {name}:
            visit(used, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_a_base_name_stands_once() -> None:
    """So that a name in a traceback or an editor's tab says which module it is."""
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if not path.stem.startswith("__"):
            homes.setdefault(path.stem, []).append(name)
    assert not {base for base, names in homes.items() if len(names) > 1}


def made_for(name: str) -> set[str]:
    """Return the heavy libraries that a module may import at its top."""
    return next((MADE_FOR[p] for p in MADE_FOR if name == p or name.startswith(f"{p}.")), set())


def test_heavy_libraries_are_imported_on_first_use() -> None:
    for name, path in sorted(MODULES.items()):
        used = imports_of(path)[1]
        assert not {u.split(".")[0] for u in used} & set(HEAVY) - made_for(name), name
        assert not {u for u in used if made_for(u)} or made_for(name), (
            f"{name} imports at its top what is heavy"
        )


def test_import_lowshard_and_every_module_of_it_loads_no_heavy_library() -> None:
    names = sorted(n for n in MODULES if not n.endswith(".__main__") and not made_for(n))
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        f"print(sorted(set(m.split('.')[0] for m in sys.modules) & set({HEAVY!r})))\n"
        "print([m for m in ('kernels', 'launch', 'bench') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == ["[]", "[]"], ran.stdout


def test_modules_stay_small() -> None:
    for name, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 700, f"{name} has {lines} lines: split it"
