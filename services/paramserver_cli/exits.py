"""Exit codes of psctl, and the errors that lead to them."""

import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from paramserver.errors import AuthError, PsError, RequestError, Unavailable
from paramserver_cli.launch import Failed

FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
REFUSED: Final = 4
INTERRUPTED: Final = 130


def code_of(error: PsError) -> int:
    """The exit code of an error: 3 nobody answers, 4 the cluster refuses, 1 anything else."""
    if isinstance(error, Unavailable):
        return UNREACHABLE
    if isinstance(error, RequestError | AuthError):
        return REFUSED
    return FAILED


class Psctl(TyperGroup):
    """The outermost command: errors become one line on standard error and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except PsError as e:
            typer.echo(f"psctl: {e}", err=True)
            for part in e.errors:
                typer.echo(f"  {part.get('where', '')}: {part.get('detail', '')}", err=True)
            raise typer.Exit(code_of(e)) from None
        except Failed as e:
            typer.echo(f"psctl: {e}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # `psctl logs | head`
            sys.stderr.close()
            raise typer.Exit(FAILED) from None
