"""The command `psctl`, also as `python -m paramserver_cli`."""

import os
import sys


def _open_streams() -> None:
    """Open the null device in place of each of the standard streams that the caller has closed, as with `<&-`.

    Else a file that is opened later takes the number, such as the lock of a state directory, and the supervisor, which
    is to inherit it, gets its own stream under that number instead.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def psctl() -> None:
    """Run psctl; Ctrl-C is no traceback even while the rest is still being imported."""
    try:
        _open_streams()
        from paramserver_cli.main import app

        app(prog_name="psctl")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    psctl()
