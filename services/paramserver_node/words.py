"""NAME=VALUE words of a command line."""

import json
from collections.abc import Iterable
from typing import Any

import typer


def pairs(words: Iterable[str]) -> dict[str, Any]:
    """Return NAME=VALUE words as a mapping; a value is JSON (`3`, `true`, `[0.9, 0.95]`), or else a text (`fold`).

    Raises BadParameter (exit code 2) for any other word.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"'{word}' must look like name=value")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def arguments(words: Iterable[str]) -> dict[str, Any]:
    """Return the NAME=VALUE words of `--arg` as a function's arguments.  Raises BadParameter (exit code 2)."""
    found = pairs(words)
    for name in found:
        if not name.isidentifier():
            raise typer.BadParameter(f"'{name}' cannot be the name of a function's argument", param_hint="--arg")
    return found
