"""What setuptools runs in addition when it builds lowshard: functions are compiled into the package.

Loaded by setuptools alone, before lowshard can be imported. Where there is no Numba, a build goes on without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_OBJECTS = Path("lowshard", "compiled", "objects")


class BuildPy(build_py):  # type: ignore[misc]
    """Builds the Python files, then object code beside them; of an editable install in the checkout."""

    def run(self) -> None:
        """Run the command."""
        super().run()
        root = Path.cwd() if self.editable_mode else Path(self.build_lib).resolve()
        folder, new = root / _OBJECTS, root / f"{_OBJECTS}-new"
        shutil.rmtree(new, ignore_errors=True)
        command = [sys.executable, "-B", "-m", "lowshard.warmup.compile_all", str(new)]
        try:
            subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, check=True, timeout=3600)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(new, ignore_errors=True)
            print(f"lowshard: this build comes without object code: {error}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build's
        if new.is_dir():
            new.rename(folder)


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel is for one kind of machine where object code is in it; for any Python, which object code does not see."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        python, abi, machine = super().get_tag()
        has_code = any(Path(self.bdist_dir).glob(f"{_OBJECTS}/*/*.o"))
        return python, abi, f"{sys.platform}_{os.uname().machine}" if has_code else machine
