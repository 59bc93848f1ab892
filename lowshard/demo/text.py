"""The demo's sentences, and how they become token ids."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lowshard.demo.source import Source
from lowshard.errors import CheckpointError, DependencyError

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates rose again this quarter, and house prices fell for the third month in a row.",
    "The central bank made borrowing more expensive, which cooled the property market.",
    "She tuned the old violin before the concert.",
    "The orchestra rehearsed the slow movement until the strings finally breathed together.",
    "Where can I buy a train ticket to the coast?",
    "How do I get to the seaside by rail, and where are tickets sold?",
    "Rain.",
    "It has been pouring since dawn, the gutters overflow, and the cellar smells of wet stone.",
    "The bakery on the corner sells rye bread, poppy seed rolls and, on Fridays, a plum cake that is gone by ten.",
    "Knead the dough for ten minutes, let it rest under a towel, then fold it twice.",
    "The function returns early when the list is empty.",
    "If there are no elements, the procedure exits before the loop.",
    "A matrix product can be cut by rows or by columns; the first needs a sum at the end, the second does not.",
    "Each worker keeps a slice of the weights and adds its partial result to the others'.",
    "The glacier has lost a third of its length since the first photographs were taken.",
    "Sea ice in the bay formed three weeks later than it did a generation ago.",
    "Please return the library books by Monday.",
    "He forgot his umbrella on the night bus.",
    "The goalkeeper dived to the left and pushed the ball around the post.",
    "After extra time and eleven penalties, the smaller club went through to the final.",
    "Volcanic soil is rich in minerals, so vines grow well on the slopes even though the rain runs off quickly.",
    "The museum's new wing shows maps that sailors drew from memory, with monsters where they had not been.",
    "My grandmother kept buttons in a biscuit tin.",
    "Vaccines train the immune system to recognise a germ before it arrives.",
    "A small dose of a harmless fragment teaches the body how to defend itself.",
    "The telescope found water vapour in the atmosphere of a planet forty light years away.",
    (
        "Two moons rose over the red desert, and the machine that had waited there for nine years unfolded its panels "
        "once more, sent a greeting towards a blue point low in the east, and went back to counting grains of dust."
    ),
    "Is the kitchen table big enough for eight people?",
    "The contract ends in March unless both parties agree in writing to extend it by a further twelve months.",
    "Quiet, please: the exam has begun.",
)
"""Varied lengths; pairs that mean nearly the same stand next to each other."""

_CLS, _SEP, _FIRST_WORD = 1, 2, 3
_WORDS = re.compile(r"[a-z0-9']+|[^\sa-z0-9']")


def tokenizer_name(source: Source) -> str:
    """Return what turns this source's sentences into ids, for the report."""
    return "hash stand-in (no tokenizer.json)" if source.tokenizer is None else source.tokenizer.name


def tokenize(
    source: Source, sentences: Sequence[str], max_length: int = 128
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids and mask, `[batch, seq]` int64; without a tokenizer.json words have hashes as ids."""
    if source.config is not None:
        max_length = min(max_length, source.config.max_positions)
    rows = (_hash_ids if source.tokenizer is None else _ids)(source, sentences, max_length)
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    if source.config is not None and ids.max() >= source.config.vocab_size:
        raise CheckpointError(
            f"{source.tokenizer} gives id {ids.max()}, the model has embeddings for 0..{source.config.vocab_size - 1}: "
            "tokenizer.json must be the model's own"
        )
    return ids, mask


def _ids(source: Source, sentences: Sequence[str], max_length: int) -> list[list[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DependencyError(
            "the demo turns sentences into token ids with tokenizers, which is not installed: "
            "pip install 'lowshard[demo]'"
        ) from error
    assert source.tokenizer is not None
    try:
        text = source.tokenizer.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise CheckpointError(f"{source.tokenizer} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_padding()  # MiniLM's file pads everything to 128
    tokenizer.enable_truncation(max_length)
    # One by one: a batch call starts threads, which warn in a process that forks later.
    return [list(tokenizer.encode(sentence).ids) for sentence in sentences]


def _hash_ids(source: Source, sentences: Sequence[str], max_length: int) -> list[list[int]]:
    words = (source.config.vocab_size if source.config is not None else 1 << 15) - _FIRST_WORD
    rows = []
    for sentence in sentences:
        found = _WORDS.findall(sentence.lower())[: max_length - 2]
        ids = [_FIRST_WORD + zlib.crc32(word.encode()) % words for word in found]
        rows.append([_CLS, *ids, _SEP])
    return rows
