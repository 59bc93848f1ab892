"""What one version of a refit has cost a rank: `Refit.report`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RefitCost:
    """Filled while a version is moved. Its fields are what `Refit.report` returns, which says what they mean."""

    dense_bytes: int = 0
    sent_bytes: int = 0
    changed_elems: int = 0
    pause_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a block to a phase; one that comes again adds up."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start_s

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a copy."""
        return asdict(self)
