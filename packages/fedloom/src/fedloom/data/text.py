"""Text as tokens, which are numbers in a vocabulary. Sequences are padded with 0 at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

PAD_TOKEN, UNKNOWN_TOKEN = "<pad>", "<unk>"
"""First two entries of every vocabulary that is built from text."""

NO_LABEL = -1
"""Target of positions that are not evaluated: padding, or positions with an unknown label."""

Level = Literal["character", "word"]
_WORD_PATTERN = re.compile(r"[\w']+|[^\w\s]")


def tokenize_text(text: str, level: Level) -> Sequence[str]:
    """Return the tokens of a text. They are either characters, or words and punctuation marks in lower case.

    >>> tokenize_text("Don't go!", "word")
    ["don't", 'go', '!']
    """
    return text if level == "character" else _WORD_PATTERN.findall(text.lower())


def infer_level(vocabulary: Sequence[str]) -> Level:
    """Return "character" or "word", the kind of the entries of a vocabulary."""
    return "character" if all(len(token) == 1 for token in vocabulary[2:]) else "word"


def build_vocabulary(texts: Iterable[str], level: Level, most: int | None = None, least: int = 1) -> tuple[str, ...]:
    """Return a vocabulary: padding, the unknown token, and the tokens of the texts in alphabetical order.

    Args:
        texts: all texts.
        level: kind of token.
        most: maximum number of tokens in the vocabulary. If there are more different tokens, only the most frequent
            ones are kept. None to keep all of them.
        least: minimum number of occurrences of a token.

    >>> build_vocabulary(["abba", "ac"], "character", least=2)
    ('<pad>', '<unk>', 'a', 'b')
    """
    counts = Counter(chain.from_iterable(tokenize_text(text, level) for text in texts))
    ranked = sorted(((-count, token) for token, count in counts.items() if count >= least))
    return (PAD_TOKEN, UNKNOWN_TOKEN, *sorted(token for _, token in ranked[: None if most is None else most - 2]))


def encode_texts(texts: Sequence[str], vocabulary: Sequence[str], length: int) -> Tensor:
    """Return texts as tokens ``[N, length]`` (int32), with padding at the end and 1 for unknown tokens.

    Longer texts are shortened to their first words or their last characters. A text without tokens is represented by a
    single unknown token.
    """
    level, code = infer_level(vocabulary), {token: k for k, token in enumerate(vocabulary)}
    out = np.zeros((len(texts), length), np.int32)
    for row, text in zip(out, texts, strict=True):
        tokens = tokenize_text(text, level)
        tokens = (tokens[-length:] if level == "character" else tokens[:length]) or [UNKNOWN_TOKEN]
        row[: len(tokens)] = [code.get(token, 1) for token in tokens]
    return torch.from_numpy(out)


def recode_tokens(x: Tensor, names: Sequence[str], vocabulary: Sequence[str]) -> Tensor:
    """Convert tokens of the vocabulary ``names`` to tokens of a different vocabulary.

    Tokens that the other vocabulary does not contain become 1.
    """
    place = {token: k for k, token in enumerate(vocabulary)}
    code = torch.tensor([0, *(place.get(token, 1) for token in names[1:])], dtype=torch.int32, device=x.device)
    return x if tuple(names) == tuple(vocabulary) else code[x.long()]


def token_errors(x: Tensor, vocabulary: Sequence[str]) -> Iterator[str]:
    """Yield an error message for each kind of invalid token in the samples."""
    if x.dtype not in (torch.int32, torch.int64) or x.ndim != 2:
        yield f"tokens must be whole numbers [N, length] (int32 or int64), got {x.dtype} {[*x.shape]}. Encode the text"
        return
    beyond = ((x < 0) | (x >= len(vocabulary))).nonzero()
    if len(beyond):
        sample, place = beyond[0].tolist()
        yield (
            f"sample {sample} contains the token {int(x[sample, place])} at position {place}, but the "
            f"vocabulary has {len(vocabulary)} entries (0 to {len(vocabulary) - 1}, 0 is padding). "
            "Use a larger vocabulary, or encode the samples with this vocabulary"
        )
    is_token = x != 0
    for what, bad in (
        ("contains only padding (token 0). Remove it", ~is_token.any(1)),
        (
            "contains padding (token 0) before its end. Pad sequences only at the end",
            (is_token[:, 1:] > is_token[:, :-1]).any(1),
        ),
    ):
        if bool(bad.any()):
            yield f"sample {int(bad.nonzero()[0])} {what}"


def label_errors(x: Tensor, y: Tensor, classes: int) -> Iterator[str]:
    """Yield error messages for invalid labels of positions ``[N, length]``, where -1 means that there is no label."""
    if y.dtype != torch.int64 or y.shape != x.shape:
        yield (
            f"labels of positions must be int64 like the tokens {[*x.shape]}, got {y.dtype} "
            f"{[*y.shape]}. Set a label for every position, or -1 for no label"
        )
        return
    yield from label_range_errors(y, classes)
    padded = ((y >= 0) & (x == 0)).any(1)
    if bool(padded.any()):
        yield f"sample {int(padded.nonzero()[0])} has a label on padding (token 0). Set these labels to -1"


def label_range_errors(y: Tensor, classes: int) -> Iterator[str]:
    """Yield error messages for positions ``[N, length]`` whose label is not a class, and for samples without labels."""
    if int(y.min()) < NO_LABEL or int(y.max()) >= classes:
        yield f"labels must be within 0..{classes - 1}, or -1 for none, got {int(y.min())}..{int(y.max())}"
    without = (y < 0).all(1)
    if bool(without.any()):
        yield f"sample {int(without.nonzero()[0])} has no label at any position. Remove it"
