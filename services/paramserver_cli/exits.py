"""Exit codes of psctl, and the errors that lead to them."""

import errno
import io
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

from paramserver.errors import AuthError, PsError, RequestError, Unavailable, Unreachable
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import running

FAILED: Final = 1
UNREACHABLE: Final = 3
REFUSED: Final = 4
INTERRUPTED: Final = 130

HINTS: Final[Mapping[str, str]] = {
    "pass exist_ok=True to use it": "--exist-ok uses it",
    "as_= names another; exist_ok=True sets it to the checkpoint's values": (
        "--as names another; --exist-ok sets it to the checkpoint's values"
    ),
    "name another one with as, or set this one to the checkpoint's values with exist_ok": (
        "--as names another; --exist-ok sets it to the checkpoint's values"
    ),
    "choose another path, or allow overwriting": "choose another folder, or --overwrite replaces it",
    "the list of runs has their ids": "psctl run list shows them",
    "the list of shards names them": "psctl status shows them",
    "a longer timeout=, or model.save() on the server": "PARAMSERVER_TIMEOUT_S=300 gives it five minutes",
    "try again, with a longer timeout": "again, with PARAMSERVER_TIMEOUT_S=300, it has five minutes",
    "again, with a longer timeout=": "again, with PARAMSERVER_TIMEOUT_S=300, it has five minutes",
    "look before you repeat it, and give it a longer timeout=": (
        "look before you repeat it; PARAMSERVER_TIMEOUT_S=300 gives it five minutes"
    ),
    "it may be being written still: look with model.checkpoints(), or give it a longer timeout=": (
        "it may be being written still: psctl checkpoint list shows it; PARAMSERVER_TIMEOUT_S=300 gives it five minutes"
    ),
    "stop it first": "psctl run stop ends it; psctl run list shows the runs",
    "create it, or look for its name in the list of models": "psctl models lists them, psctl create makes one",
    "choose another name, change the model's settings, or delete it first": (
        "choose another name; psctl set changes the model"
    ),
}
"""Hints for callers of REST and Python, and the same advice for the command line."""


def one_line(error: PsError) -> str:
    """Return an error as one line, with its hint in terms of the command line."""
    hint = HINTS.get(error.hint, error.hint)
    return f"{error.detail} ({hint})" if hint else error.detail


def os_error_text(error: OSError) -> str:
    """Return the message of an error about a file or folder, or a full disk or quota; empty for any other."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if error.errno == errno.ENOENT:  # of `os.getcwd`; that of `tempfile` has a text of its own
        deleted = error.strerror == os.strerror(errno.ENOENT)
        return "the current folder has been deleted: change to another one" if deleted else str(error.strerror)
    return str(error.strerror) if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""


def drop_output() -> None:
    """Drop what standard output cannot take: Python would try again at exit, with a message and a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def code_of(error: PsError) -> int:
    """Return the exit code of an error: 3 for Unavailable, 4 for a refusal (RequestError, AuthError), else 1."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    if isinstance(error, RequestError | AuthError):
        return REFUSED
    return FAILED


class Group(TyperGroup):
    """Commands whose help fills the terminal: lines of a paragraph are joined, except those of an indented block."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help)
        return command


class Psctl(Group):
    """The outermost command: turns errors into a line on standard error and an exit code instead of a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run psctl; what standard output has no characters for is printed as `?`, and what it cannot take is told."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            # By PYTHONUNBUFFERED, whose writes end early without an error.
            if isinstance(sys.stdout.buffer, io.RawIOBase):
                sys.stdout = open(sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, closefd=False)
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().main(*args, **options)
        except OSError as e:
            if not (text := os_error_text(e)):
                raise  # a bug: its traceback is what helps
            typer.echo(f"psctl: {text}", err=True)
            drop_output()
            sys.exit(FAILED)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and report its errors."""
        try:
            return super().invoke(ctx)
        except PsError as e:
            typer.echo(f"psctl: {one_line(e)}", err=True)
            listed = [] if all(str(part.get("detail")) in e.detail for part in e.errors) else e.errors
            for part in listed:
                typer.echo(f"  {part.get('where', '')}: {part.get('detail', '')}", err=True)
            if isinstance(e, Unreachable) and running():
                typer.echo("  psctl list shows the clusters that run on this machine; --url names one", err=True)
            raise typer.Exit(code_of(e)) from None
        except Failed as e:
            typer.echo(f"psctl: {e}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `psctl logs | head`
            drop_output()
            raise typer.Exit(FAILED) from None
