"""`python -m paramserver_cli` is `psctl`."""

from paramserver_cli.main import app

if __name__ == "__main__":
    app(prog_name="psctl")
