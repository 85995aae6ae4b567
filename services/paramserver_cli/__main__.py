"""The command `psctl`, also as `python -m paramserver_cli`."""

import sys


def psctl() -> None:
    """Run psctl; Ctrl-C is no traceback even while the rest is still being imported."""
    try:
        from paramserver_cli.main import app

        app(prog_name="psctl")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    psctl()
