"""TOML files, which are read as documents. Error messages state the path and how to fix the problem."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError
from fedloom.storage.files import read_content

MAX_TOML_DEPTH = 32
"""Maximum nesting depth of the tables and arrays in a TOML file."""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the document in a TOML file.

    Args:
        path: the file.
        what: description of the document, used in messages, e.g. ``"experiment file"``.

    Raises:
        ConfigError: the file does not exist, cannot be read, or does not contain valid TOML.
    """
    if path.exists() and not path.is_file():
        kind = "is a folder" if path.is_dir() else "is a pipe, socket or device"
        raise ConfigError(f"cannot read the {what} {path}: it {kind}. Use the path of a TOML file")
    return parse_document(read_content(path, f"the {what}", "use the path of a TOML file"), path)


def parse_document(content: bytes, path: Path) -> dict[str, Any]:
    """Parse the content of a TOML file. A byte order mark at the beginning of the content is skipped.

    Raises:
        ConfigError: the content is not TOML. The message states the path.
    """
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))
        if not _is_shallow(document):
            raise RecursionError
        return document
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: its arrays or tables are nested too deeply") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not a TOML file: line {line} is not valid UTF-8. Save the file as UTF-8"
        ) from None
    except ValueError as error:  # invalid TOML, or a number with thousands of digits
        fault = str(error).replace("Cannot overwrite a value", "A key is given twice. Leave one of them out")
        fault = re.sub(r"Cannot declare \((.+?),?\) twice", _describe_repeated_heading, fault)
        raise ConfigError(f"{path} is not a TOML file: {fault}") from None


def _describe_repeated_heading(heading: re.Match[str]) -> str:
    """Return a description of the error that a table has two headings, with advice on how to fix it."""
    name = ".".join(heading[1].replace("'", "").split(", "))
    return f"The table [{name}] is given twice. Write all its keys under one heading"


def _is_shallow(document: Mapping[str, object]) -> bool:
    """Return True if tables and arrays are nested at most `MAX_TOML_DEPTH` levels deep."""
    level: list[Any] = [document]
    for _ in range(MAX_TOML_DEPTH):
        inner = [v for value in level for v in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in inner if isinstance(value, dict | list)]
    return not level
