"""psctl checkpoint: saves to and restores from folders on this machine or the cluster's own state directory."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paramserver.errors import NotFoundError, problem
from paramserver.limits import MIB
from paramserver_cli.config import Json, Url, connect
from paramserver_cli.display import columns, console, print_list
from paramserver_cli.exits import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Save, restore, list and delete checkpoints.",
    epilog="psctl checkpoint save demo ./ckpt",
)
ModelName = Annotated[str, typer.Argument(help="The model's name.")]


@app.command()
def save(
    model: ModelName,
    path: Annotated[
        Path | None, typer.Argument(help="Folder on this machine; none: the cluster keeps it a while.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The cluster keeps it under this name until it is deleted.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in that folder.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Save a checkpoint: parameters (safetensors), optimizer state, worker states, checksums.

    psctl checkpoint save demo ./ckpt

    psctl checkpoint save demo

    psctl checkpoint save demo --name before-decay
    """
    if path is None and overwrite:
        raise typer.BadParameter("it is for a folder: name one, or leave it out", param_hint="--overwrite")
    if path is not None and name is not None:
        raise typer.BadParameter("it is for one that the cluster keeps, not for a folder", param_hint="--name")
    found = connect(url).model(model)
    document = found.save(name) if path is None else found.checkpoint(path, overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(document))
        return
    typer.echo(f"saved as {document['name']}" if path is None else f"saved to {path}")
    if path is None and name is None:
        keep = found.info()["spec"]["checkpoint"]["keep"]
        typer.echo(
            f"the cluster keeps the newest {keep} such checkpoints and the best one; one in a folder of yours stays",
            err=True,
        )


@app.command()
def restore(
    source: Annotated[str, typer.Argument(help="Folder on this machine, or a model, for a checkpoint in the cluster.")],
    checkpoint: Annotated[
        str | None, typer.Argument(help="Name of a checkpoint of that model, or 'latest' or 'best'.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--as", help="Name of the restored model; default: the one it had.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Number of partitions of a new model; default: as in the checkpoint.")
    ] = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Set an existing model to these values.")] = False,
    url: Url = None,
) -> None:
    """Create a model from a folder or from a checkpoint that the cluster keeps, or set a model back to the latter.

    psctl checkpoint restore ./ckpt --as demo2

    psctl checkpoint restore demo latest --as demo2

    psctl checkpoint restore demo latest

    The last one sets demo itself to these values, without --exist-ok.
    """
    if checkpoint is not None:
        client = connect(url)
        try:
            restored = client.model(source).restore(checkpoint, as_=model, partitions=partitions, exist_ok=exist_ok)
        except NotFoundError as e:
            if e.code != "unknown_checkpoint":
                raise
            raise problem(e.code, e.detail, hint=f"psctl checkpoint list {source} shows them") from None
    elif Path(source).is_dir():
        restored = connect(url).restore(source, as_=model, partitions=partitions, exist_ok=exist_ok)
    else:
        raise typer.BadParameter(
            f"there is no folder '{source}'; of one that the cluster keeps name the model, too: restore MODEL latest",
            param_hint="SOURCE",
        )
    typer.echo(f"restored model {restored.name}")


@app.command()
def delete(
    model: ModelName,
    name: Annotated[str, typer.Argument(help="The checkpoint's name.")],
    url: Url = None,
) -> None:
    """Delete a checkpoint that the cluster keeps.

    psctl checkpoint delete demo 000012-clock-400
    """
    connect(url).model(model).delete_checkpoint(name)
    typer.echo(f"deleted checkpoint {name} of model {model}")


@app.command("list")
def list_checkpoints(model: ModelName, as_json: Json = False, url: Url = None) -> None:
    """List the checkpoints that the cluster keeps of a model, oldest first.

    psctl checkpoint list demo
    """
    items = connect(url).model(model).checkpoints()
    if as_json:
        print_list(items)
        return
    table = columns("checkpoint", "clock", "MiB", "path")
    for c in items:
        table.add_row(c["name"], str(c.get("clock", "")), f"{c.get('bytes', 0) / MIB:.1f}", str(c.get("path", "")))
    console().print(table)
