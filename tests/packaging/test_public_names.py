"""`dir()` of a public module shows what it promises: the names of the reference, and nothing that it imports."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def modules() -> list[str]:
    """Return the modules that the reference shows, and those of single names that say what they show."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            try:
                importlib.import_module(name)
                found.add(name)
            except ModuleNotFoundError:  # a class or a function
                home = name.rpartition(".")[0]
                found |= {home} if "__dir__" in vars(importlib.import_module(home)) else set()
    return sorted(found)


def test_the_reference_has_every_package() -> None:
    assert {"lowshard", "lowshard.comm", "lowshard.kernels", "lowshard.errors"} < set(modules())
    assert len(modules()) >= 16


@pytest.mark.parametrize("name", modules())
def test_dir_shows_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    shown = dir(module)
    assert "Any" not in shown
    assert set(module.__all__) <= set(shown)
    if name != "lowshard":  # which shows its public packages too, once they are loaded
        assert sorted(module.__all__) == shown
    for each in module.__all__:
        assert each == "__version__" or not each.startswith("_"), each
        thing = getattr(module, each)
        assert not callable(thing) or getattr(thing, "__doc__", None), f"{name}.{each} has no docstring"


def test_the_package_shows_no_internals() -> None:
    import lowshard

    packages = {name.split(".")[1] for name in modules() if "." in name} - {"errors", "tiling", "cost"}
    assert {"fsdp", "interop"} < packages <= set(dir(lowshard))
    assert not {"annotations", "Path", "argument", "redistribute_plan"} & set(dir(lowshard))


# Those whose callers have a dtype's name, or NumPy's arrays: transforms and deltas, which lowshard calls itself.
BY_NAME = {"change_block_bytes", "store_blocks", "send_format", "recv_format", "check_tensor", "patch"}


def public_functions() -> Iterator[tuple[str, Any]]:
    for name in modules():
        module = importlib.import_module(name)
        for each in module.__all__:
            value = getattr(module, each)
            inside = vars(value) if inspect.isclass(value) else {each: value}
            for called, function in inside.items():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and not called.startswith("_"):
                    yield called, function


def test_any_dtype_and_arrays_of_any_library_pass_a_type_checker() -> None:
    narrow = {
        f"{function.__qualname__}: {parameter}"
        for called, function in public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if (parameter.name == "dtype" and parameter.annotation == "str" and called not in BY_NAME)
        or "ndarray" in str(parameter.annotation)
    }
    assert narrow == set()
