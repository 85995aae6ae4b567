"""psctl create, set, pull, models and delete: commands for models."""

from __future__ import annotations  # client classes are named, but not imported until used

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import paramserver as ps
from paramserver_cli.assignments import spec_patch
from paramserver_cli.config import Json, Url, connect, listed
from paramserver_cli.display import print_list
from paramserver_cli.launch import Failed


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml publishes no types
    """A YAML loader that reads `1e-3` as a number; YAML 1.1 reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_spec(path: Path) -> dict[str, Any]:
    """Read a model's spec from a YAML or JSON file, or standard input for `-`.  Raises Failed if it cannot be read."""
    try:
        found = yaml.load(sys.stdin if str(path) == "-" else path.read_text("utf-8"), Loader=_Loader)
    except OSError as e:
        raise Failed(f"cannot read {path}: {e.strerror}") from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: not UTF-8, or an impossible date
        raise Failed(f"{path} is not YAML: {_in_one_line(e)}") from None
    if not isinstance(found, dict):
        raise Failed(f"{path} must hold an object with 'params'")
    return found


def _in_one_line(error: Exception) -> str:
    said = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        said = f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(said.split())


def create(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    file: Annotated[
        Path, typer.Option("--file", "-f", help="YAML or JSON file with the spec; - reads standard input.")
    ],
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Accept an existing model with the same spec.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a model from a file.

    The file holds what POST /models takes, for example:

        params:
          w: {shape: [64, 10], init: {kind: xavier_uniform}}
          b: {shape: [10]}
        optimizer: {name: adam, lr: 0.001}
        consistency: {mode: sync}

    psctl create demo -f spec.yaml
    """
    spec = read_spec(file)
    made = create_from(connect(url), model, spec, exist_ok=exist_ok).info()
    if as_json:
        typer.echo(json.dumps(made))
    else:
        count = len(made["spec"]["params"])
        parameters = "1 parameter" if count == 1 else f"{count} parameters"
        typer.echo(f"model {made['name']}: {parameters}, {made['spec']['consistency']['mode']}")


def create_from(client: ps.Client, model: str, spec: dict[str, Any], *, exist_ok: bool) -> ps.Model:
    """Create a model from the contents of a spec file.  Raises Failed for unknown fields."""
    allowed = ("optimizer", "consistency", "partitions", "ack", "evaluate_every", "checkpoint")
    options = {k: v for k, v in spec.items() if k not in ("name", "params")}
    unknown = [k for k in options if k not in allowed]
    if unknown:
        raise Failed(f"the spec has unknown fields: {', '.join(unknown)}; known: params, {', '.join(allowed)}")
    return client.create_model(model, spec.get("params", {}), exist_ok=exist_ok, **options)


def set_(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    settings: Annotated[list[str], typer.Argument(help="Settings, such as lr=0.05.", metavar="NAME=VALUE...")],
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Change settings of a model while it trains.

    psctl set demo lr=0.05

    psctl set demo mode=ssp staleness=2

    psctl set demo optimizer=adam 'betas=[0.9,0.95]'
    """
    from paramserver.client.cluster import model_path

    patch = spec_patch(settings)  # what is wrong with it is told without a cluster
    changed = connect(url).request("PATCH", model_path(model), patch)
    if as_json:
        typer.echo(json.dumps(changed))
    else:
        typer.echo(f"model {changed['name']} is at revision {changed['revision']}")


def pull(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    name: Annotated[str, typer.Argument(help="The parameter's name.")],
    min_version: Annotated[int, typer.Option(min=0, help="Wait for this version.")] = 0,
    wait_s: Annotated[float, typer.Option(min=0.0, help="How long to wait for it.")] = 0.0,
    url: Url = None,
) -> None:
    """Write one parameter to standard output as a .npy file.

    psctl pull demo w > w.npy

    psctl pull demo layers.0.weight --min-version 100 --wait-s 30 > w.npy
    """
    if sys.stdout.isatty():
        raise typer.BadParameter(f"this prints binary data; write it to a file: psctl pull {model} {name} > {name}.npy")
    import numpy as np

    values = connect(url).model(model).pull([name], min_version=min_version, wait_s=wait_s)
    if name not in values:  # a file holds one array
        raise typer.BadParameter(f"'{name}' stands for {len(values)} parameters, name one of: {', '.join(values)}")
    array = np.asarray(values[name])
    np.lib.format.write_array_header_1_0(sys.stdout.buffer, np.lib.format.header_data_from_array_1_0(array))
    sys.stdout.buffer.write(array.data)  # not `write_array`: NumPy bypasses the buffer of a real file
    sys.stdout.buffer.flush()


def models(as_json: Json = False, url: Url = None) -> None:
    """List the models of the cluster.

    psctl models
    """
    items = listed(connect(url), "/models")
    if as_json:
        print_list(items)
        return
    if not items:  # on standard error, so that a script does not read it as a model
        typer.echo("there are no models yet; psctl create makes one", err=True)
    for m in items:
        typer.echo(f"{m['name']:24} {m['state']:12} version {m['version']:<8} {m.get('mode', '')}")


def delete(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
) -> None:
    """Delete a model: its parameters, metrics and datasets; checkpoints stay.

    psctl delete demo

    psctl delete demo --yes
    """
    client = connect(url)
    version = client.model(model).info()["version"]
    if not yes:
        typer.confirm(f"delete model {model}, at version {version}?", abort=True, err=True)
    client.model(model).delete()
    typer.echo(f"model {model} is deleted")
