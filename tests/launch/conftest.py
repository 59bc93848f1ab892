"""Fixtures of the tests of the launcher."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launching import Launcher, stray_files


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher after which no process, no temporary file and no shared memory may be left."""
    made = Launcher(tmp_path, uuid.uuid4().hex, stray_files())
    yield made
    made.check_nothing_left()
