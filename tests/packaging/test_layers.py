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
_ON_FLOOR = {
    "0": """
        _version errors argument document dtypes block_format bounded box reading content_hash nearest
        plain_console command_line settings gpu_stream foreign_array compiled
    """,
    "0k": "kernels",
    "0c": "comm",
    "1": "mesh placement layout tiling",
    "2": "cost step_cost rules",
    "3": """
        exchange step_search redistribute_plan solver reshard.dim_sharding reshard.rank_grid
        reshard.partition reshard.tensor_layout reshard.parameter_record reshard.replica_shares
        reshard.reshard_move reshard.move_schedule reshard.reshard_plan reshard.plan_builder
        reshard.model_tables reshard.scale_slice reshard.cache_layouts
    """,
    "4": """
        pool transfer reshard.content_digest reshard.published_tensors reshard.rank_side reshard.reshard_run
        reshard.mxfp8_transform reshard.version_changes reshard.atomic_word execute op
    """,
    "5": "reshard reshard.refit checkpoint weights fsdp",
    "6": "launch",
    "7": """
        rules.rules_command solver.solve_command checkpoint.inspect_command weights.reshard_command
        interop bench demo selftest warmup cli __main__
    """,
}
FLOORS = {f"lowshard.{name}": floor for floor, names in _ON_FLOOR.items() for name in names.split()}
FLOORS["lowshard"] = "4"
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
    "cupy", "numba", "llvmlite", "mpi4py", "yaml", "safetensors", "isal", "msgspec", "rich",
    "matplotlib", "tokenizers", "ml_dtypes", "scipy", "torch", "jax",
)  # fmt: skip


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
