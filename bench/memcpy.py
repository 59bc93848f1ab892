"""The yardstick of every figure: a plain copy of as many bytes, by as many processes, in the same run."""

from __future__ import annotations

import numpy as np


class BesideMemcpy:
    """Times of rounds, each beside that of a copy right after it. A base of rows of tables."""

    seconds: tuple[float, ...]
    memcpy_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """X memcpy: the median over rounds."""
        return float(np.median([a / b for a, b in zip(self.seconds, self.memcpy_s, strict=True)]))

    @property
    def median_s(self) -> float:
        """Median time of a round."""
        return float(np.median(self.seconds))
