"""psctl token and psctl secret; secrets and tokens for the processes that psctl starts."""

from __future__ import annotations  # client classes are named, but not imported until used

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from paramserver.core.urls import is_loopback
from paramserver.errors import problem
from paramserver_cli.config import StateDirOption, client_settings, secret_of, state_dir
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import Cluster, Plan, StateDir
from paramserver_node import tokens
from paramserver_node.roles import Role
from paramserver_node.settings import SchedulerSettings, WorkerSettings

DAY_S = 86_400


def token(
    role: Annotated[str, typer.Argument(help="reader, worker, node or admin.")] = "admin",
    name: Annotated[
        str, typer.Option(help="Name of the token, used to revoke it (PARAMSERVER_REVOKED); default: the role.")
    ] = "",
    days: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Days until it expires; default: never.")
    ] = None,
    state: StateDirOption = None,
) -> None:
    """Print an access token, made from the cluster's secret; run it where the secret is.

    A reader pulls and lists, a worker also pushes, an admin may do everything. Tokens are not stored: the same command
    prints the same token again (with --days, one that expires later). A token is valid until it expires, its name is
    revoked or the secret is changed.

        export PARAMSERVER_TOKEN=$(psctl token worker)

        PARAMSERVER_TOKEN=$(docker compose exec -T scheduler-1 psctl token)

        psctl token reader --name ci --days 30
    """
    keys = tokens.keys_of(secret_of(state_dir(state)))
    if not keys:
        raise Failed(
            "no secret found; it is needed to make tokens: set PARAMSERVER_SECRET_FILE to the nodes' file, "
            "or run this where a node runs (a cluster that only this machine can reach has none, and needs no token)"
        )
    expires_at_s = 0 if days is None else int(time.time() + days * DAY_S)
    typer.echo(tokens.make(keys[0], cast(Role, role), name, expires_at_s))


def secret(
    file: Annotated[Path | None, typer.Argument(help="Where to write it; default: print it.")] = None,
) -> None:
    """Create the secret of a new cluster; every node gets the same file, as PARAMSERVER_SECRET_FILE.

    An existing file is not overwritten.

        psctl secret paramserver.secret
    """
    if file is None:
        typer.echo(tokens.new_key())
    elif write_secret(file):
        setting = f"PARAMSERVER_SECRET_FILE={shlex.quote(str(file.absolute()))}"
        typer.echo(f"made {file}; for each node and for psctl token: export {setting}")
    else:
        raise problem("conflict", f"{file} already exists", hint="docs/operations.md describes how to change a secret")


def write_secret(file: Path) -> bool:
    """Write a new secret to a file that only this user can read; return False if the file exists already."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as out:
        out.write(f"{tokens.new_key()}\n")
    return True


def node_environment(state: StateDir, plan: Plan) -> Mapping[str, str]:
    """Return environment variables for the nodes of a cluster on this machine, beyond those they inherit.

    A cluster that other machines can reach gets a secret of its own, unless one is set or `insecure` is.
    """
    found = SchedulerSettings.load({"insecure": plan.insecure or None})
    if found.secret or is_loopback(plan.host):
        return {}
    if found.insecure:
        return {"PARAMSERVER_INSECURE": "yes"}
    write_secret(state.secret_file)
    return {"PARAMSERVER_SECRET_FILE": str(state.secret_file)}


def needs_tokens(environment: Mapping[str, str]) -> bool:
    """Return whether nodes with this `node_environment` require tokens."""
    return "PARAMSERVER_SECRET_FILE" in environment or bool(SchedulerSettings.load({}).secret)


def printable_cluster(cluster: Cluster) -> dict[str, object]:
    """Return a cluster as the object to print: with an admin token, if a secret is known here."""
    secret = secret_of(StateDir(Path(cluster.state_dir)))
    return asdict(replace(cluster, token=tokens.of_secret(secret, "admin")))


def worker_environment(state: StateDir, urls: Sequence[str], *, ours: bool) -> Mapping[str, str]:
    """Return environment variables for workers of the cluster at `urls`: what they need to be let in, and lack.

    Into the cluster of this supervisor (`ours`) that is a token made with its secret, as one that is set may be for
    another.  Into any other it is what lets psctl in: its token, else one made with a secret that is set.  Over https,
    also the `ca`.
    """
    own, client = WorkerSettings.load({}), client_settings({})
    found = {}
    made = tokens.of_secret(secret_of(state), "worker", tokens.POOL)
    if made and ours:
        found["PARAMSERVER_TOKEN"] = made
    elif not ours and not own.token and (token := client.token or made):
        found["PARAMSERVER_TOKEN"] = token
    if not own.ca and client.ca and urls[0].startswith("https:"):
        found["PARAMSERVER_CA"] = client.ca
    return found
