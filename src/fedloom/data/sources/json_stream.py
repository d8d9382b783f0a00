"""JSON read as a stream, key by key and row by row, so that large LEAF files need little memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError

BLOCK = 2**16
LONGEST = 2**26
"""Characters that one value may have; a file with more is not what it says."""


class JsonStream:
    """A place in a JSON text. Whoever asks for a key or row must take its value before asking for the next."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream, self._where = stream, where
        self._text, self._at = "", 0
        self._decoder = json.JSONDecoder()

    def members(self) -> Iterator[str]:
        """The keys of an object; the caller takes each value."""
        self._take("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._bad(f"a key, got {key!r}")
            self._take(":")
            yield key
            if self._next_or("}"):
                return

    def rows(self) -> Iterator[NDArray[np.float64]]:
        """The elements of an array as rows of numbers, inner arrays flattened; a plain array of numbers is one row."""
        self._take("[")
        if self._peek() == "]":
            self._at += 1
            return
        if self._peek() != "[":
            yield self._numbers(self._until_close())
            return
        while True:
            self._take("[")
            text = self._until_close()
            while text.count("[") >= text.count("]") + 1:  # deeper arrays, e.g. rows of an image
                text += "]" + self._until_close()
            yield self._numbers(text.replace("[", "").replace("]", "") if "[" in text else text)
            if self._next_or("]"):
                return

    def value(self) -> Any:
        """The next value, whole."""
        self._peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._bad("a value, got one nested too deeply") from None
            except ValueError as error:
                if len(self._text) - self._at > LONGEST or not self._more():
                    raise self._bad(f"a value ({error})") from error
                continue
            if end == len(self._text) and self._more():  # a number might go on
                continue
            self._at = end
            return found

    def end(self) -> None:
        """Refuses anything after the value."""
        while self._text[self._at :].strip() == "":
            self._at = len(self._text)
            if not self._more():
                return
        raise self._bad("the end of the file")

    def _numbers(self, text: str) -> NDArray[np.float64]:
        wanted = text.count(",") + 1
        try:
            row = np.fromstring(text, np.float64, sep=",")
        except (ValueError, DeprecationWarning):
            row = np.empty(0)
        if len(row) != wanted:
            raise self._bad(f"{wanted} numbers, got {text[:60]!r}")
        return row

    def _until_close(self) -> str:
        start = self._at
        while (end := self._text.find("]", start)) < 0:
            start = len(self._text) - self._at
            if start > LONGEST or not self._more():
                raise self._bad("the end of an array")
        text = self._text[self._at : end]
        self._at = end + 1
        return text

    def _next_or(self, close: str) -> bool:
        """Whether the object or array ends here; else its comma is taken."""
        got = self._peek()
        if got not in (",", close):
            raise self._bad(f"',' or {close!r}, got {got!r}")
        self._at += 1
        return got == close

    def _take(self, wanted: str) -> None:
        got = self._peek()
        if got != wanted:
            raise self._bad(f"{wanted!r}, got {got!r}")
        self._at += 1

    def _peek(self) -> str:
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Drops what was read and appends a block."""
        block = self._stream.read(BLOCK)
        try:
            self._text = self._text[self._at :] + block.decode("ascii")
        except UnicodeDecodeError as error:
            raise self._bad("ASCII text") from error
        self._at = 0
        return bool(block)

    def _bad(self, expected: str) -> DataError:
        return DataError(
            f"{self._where}: broken JSON, expected {expected}; the file is truncated or not LEAF, fetch it again"
        )
