"""Digests: of a text, and of content, from the sums of its bits: a tensor, whatever its layout, or a whole model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lowshard.argument import brief, instance, mapping
from lowshard.errors import LayoutError

_BYTES = 16
DIGEST = re.compile(f"[0-9a-f]{{{2 * _BYTES}}}")


def text_digest(text: str) -> bytes:
    """Return 16 bytes that tell a text from others: what ranks compare of what they do, and what a plan is known by."""
    return hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()


def tensor_digest(dtype: str, shape: Sequence[int], sums: npt.NDArray[np.uint32]) -> str:
    """Return the digest of a tensor as 32 hexadecimal digits."""
    facts = json.dumps([dtype, list(shape), sums.tolist()])
    return text_digest(facts).hex()


def model_digest(digests: Mapping[str, str]) -> str:
    """Return one value for a whole model, as 32 hexadecimal digits: of the names and digests of its tensors.

    What it says is what `digest` says of each tensor: two jobs that compare it have compared all of them.

    Args:
        digests: by name, as `digest` returns them; their order does not matter.

    Raises:
        LayoutError: no mapping of names to digests, each 32 hexadecimal digits.
    """
    rule = "digests are a mapping of names to digests, as digest returns them"
    rows = sorted(mapping(digests, rule, LayoutError).items(), key=str)
    for name, value in rows:
        instance(name, str, rule, LayoutError)
        if not isinstance(value, str) or not DIGEST.fullmatch(value):
            raise LayoutError(f"{rule}, got {brief(value)} for {brief(name)}")
    return text_digest(json.dumps(rows)).hex()
