"""The command `psctl`."""

import typer

from paramserver_cli import config, demo, exits, up

app = typer.Typer(
    cls=exits.Psctl,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Start parameter server clusters on this machine, and speak to any cluster.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nobody answers, 4 the cluster refuses, 130 interrupted.",
    epilog="Start here: psctl demo",
)
app.command()(demo.demo)
app.command()(up.up)
app.command()(up.down)
app.command("list")(up.list_clusters)
app.command()(config.config)


if __name__ == "__main__":
    app()
