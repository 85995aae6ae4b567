"""psctl up, down and list: clusters on this machine."""

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from paramserver.core.scheduler.runs import ALLOWED_BY_DEFAULT
from paramserver.core.urls import DEFAULT_URL
from paramserver.errors import problem
from paramserver_cli import keys, launch
from paramserver_cli.config import Json, StateDirOption, client_settings, redis_url, state_dir
from paramserver_cli.display import columns, console, print_list
from paramserver_cli.exits import drop_output
from paramserver_cli.launch import Failed
from paramserver_cli.state_directory import Cluster, Plan, StateDir, new_lines, running
from paramserver_node import unwind
from paramserver_node.setting_checks import shown

WATCH_S = 0.5
REDIS_TIMEOUT_S = 3.0
OPTIONS = ("shards", "workers", "schedulers", "port", "host", "insecure", "allow", "redis", "appendfsync")
"""The fields of a plan that are options; where one is not given, it is as before."""
OWN_REDIS = "own"
"""Given as `--redis`, it stands for the Redis that `up` starts, in place of the one of before or PARAMSERVER_REDIS."""


def up(
    ctx: typer.Context,
    shards: Annotated[int, typer.Option(min=1, max=1024, help="Shard processes.")] = 2,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Pool workers, which wait for runs.")] = 0,
    schedulers: Annotated[int, typer.Option(min=1, max=9, help="Schedulers: one leads, the others stand by.")] = 1,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a running Redis, or own: one is started. Default: PARAMSERVER_REDIS, else own."),
    ] = None,
    appendfsync: Annotated[
        Literal["everysec", "always"],
        typer.Option(help="When the Redis that is started has a write on its disk; models at 'fsynced' need always."),
    ] = "everysec",
    state: StateDirOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; psctl down stops it.")
    ] = False,
    as_json: Json = False,
    host: Annotated[str, typer.Option(help="Address that scheduler and shards listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1024,
            max=64_000,
            help="First of a block: scheduler, shards from PORT + 1, Redis at PORT + 99, further schedulers from "
            "PORT + 98 down. Default: 8700 if free, else another.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Prefix of entry points the workers may run; repeatable.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="With --host: let others in without tokens.")] = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,  # of `ps.local()`: see `launch`
) -> None:
    """Start a cluster: Redis, schedulers, shards and workers, restarted when they die.

    Without --detach it runs until Ctrl-C. In a folder that has had a cluster it goes on from that one's data, with its
    number of shards, --port and so on: defaults are for a new folder. Examples:

        psctl up                                      two shards, in this terminal

        psctl up --detach --shards 4 --workers 2      in the background

        psctl up --schedulers 2                       another scheduler takes over when the first one dies

        psctl up --redis redis://10.0.0.3:6379/0      on a Redis of your own (with a password: PARAMSERVER_REDIS)

        psctl up --appendfsync always                 for models whose pushes survive a power cut: ack="fsynced"

        psctl up --host 0.0.0.0                       for other machines too, who need a token: psctl token
    """
    folder = state_dir(state)
    plan = Plan(
        shards,
        workers,
        # Whatever is configured here is not for `ps.local()`.
        redis_url(redis) if redis != OWN_REDIS and lifeline is None else None,
        host,
        port,
        allow=allow or [ALLOWED_BY_DEFAULT],
        insecure=insecure,
        schedulers=schedulers,
        appendfsync=appendfsync,
    )
    last = _last_plan(ctx, folder)
    plan, kept = _as_before(ctx, last, plan)
    if plan.redis is not None:
        if plan.appendfsync != "everysec":
            raise typer.BadParameter(
                "it is for a Redis that psctl up starts, and this one is yours", param_hint="--appendfsync"
            )
        _check_redis(plan.redis, kept="--redis " in kept)
    if not detach:
        unwind.on_signals()  # SIGTERM becomes an exception, so that this process ends after its cluster
    launched = launch.launch(folder, plan, detach=detach, lifeline=lifeline)
    if kept:
        typer.echo(f"as before: {kept} (an option takes the place of each)", err=True)
    if last is not None and None not in (last.redis, plan.redis) and shown(last.redis) != shown(plan.redis):
        typer.echo(f"not as before: the Redis at {shown(plan.redis)}, in place of {shown(last.redis)}", err=True)
    ready = False
    try:
        _wait(launched)
        ready = True
        if not detach:
            _print_summary(folder, as_json, detach)
            _watch(launched)
    except BaseException as e:
        typer.echo("stopping", err=True)
        launch.end(launched)
        if not ready:  # the next start is not to fail for the same options
            folder.take_back_plan(last)
        if (lost := launch.not_stored(folder)) and lost not in str(e):
            typer.echo(lost, err=True)
        raise
    if detach:  # the cluster now runs on by itself, even if its description cannot be printed
        try:
            _print_summary(folder, as_json, detach)
        except OSError as e:
            drop_output()
            raise Failed(f"the cluster is up, but its description could not be printed: {e.strerror}") from None


def _last_plan(ctx: typer.Context, folder: StateDir) -> Plan | None:
    """Return the folder's plan, None if it has none.  Raises Failed if it is not one that `up` could have written."""
    try:
        plan = folder.plan()
        for option in ctx.command.params if plan is not None else []:
            if option.name in OPTIONS:
                option.process_value(ctx, getattr(plan, option.name))
    except (ValueError, TypeError, typer.BadParameter) as e:
        raise Failed(f"{folder.path / 'plan.json'}, the options of before, cannot be used: {e} (delete it)") from None
    return plan


def _as_before(ctx: typer.Context, last: Plan | None, plan: Plan) -> tuple[Plan, str]:
    """Return the plan with what the folder's last one had where no option is given.

    And as a text of options, what of that is not what this one had.
    """
    if last is None:
        return plan, ""
    # A cluster of `ps.local()` is one process's own: it has the data of before, and what was promised of that.
    names = OPTIONS if ctx.params["lifeline"] is None else ("allow", "redis", "appendfsync")
    given = {n for n in names if getattr(ctx.get_parameter_source(n), "name", "") != "DEFAULT"}
    if "host" in given:
        given.add("insecure")  # it was said of another address
    # One that is set takes the place of another, which may have moved, but not of the folder's own, which has its data.
    if plan.redis is not None and ("redis" in given or last.redis is not None):
        given |= {"redis", "appendfsync"}
    kept = {n: getattr(last, n) for n in names if n not in given}
    options: list[str] = []
    for name, value in kept.items():
        if value != getattr(plan, name):
            values = value if isinstance(value, list) else [shown(value or OWN_REDIS) if name == "redis" else value]
            options += [f"--{name}" if v is True else f"--{name} {shlex.quote(str(v))}" for v in values]
    return replace(plan, **kept), " ".join(options)


def _check_redis(url: str, *, kept: bool) -> None:
    """Raise Unavailable (`storage_unavailable`) if this Redis cannot be used; the nodes would wait for it silently."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S) as found:
            found.ping()
    except redis.BusyLoadingError:
        return  # it runs, and is loading its data
    except redis.RedisError as e:
        raise problem(
            "storage_unavailable",
            f"the Redis at {shown(url)}{', the one of before,' if kept else ''} cannot be used: {e}",
            hint="start it, or name another with --redis or PARAMSERVER_REDIS; with --redis own, psctl up starts one",
        ) from None


def _wait(launched: launch.Launched) -> None:
    if not sys.stderr.isatty():
        launch.wait_ready(launched)
        return
    with Console(stderr=True).status("starting (the first start on a machine compiles, about half a minute)"):
        launch.wait_ready(launched)


def _print_summary(folder: StateDir, as_json: bool, detach: bool) -> None:
    cluster = folder.cluster()
    if cluster is None:
        raise Failed(f"the cluster under {folder.path} exited right after it became ready")
    if as_json:
        typer.echo(json.dumps(keys.printable_cluster(cluster)))
        return
    typer.echo(f"the cluster is up; its files are in {cluster.state_dir}")
    typer.echo(f"  scheduler and status page  {', '.join(cluster.schedulers)}")
    typer.echo(f"  shards                     {', '.join(cluster.shards)}")
    typer.echo(f"  redis                      {cluster.redis}")
    if cluster.schedulers != [DEFAULT_URL]:
        typer.echo(f"  for clients                export PARAMSERVER_URL={','.join(cluster.schedulers)}")
    if keys.printable_cluster(cluster)["token"] is not None:
        state = shlex.quote(cluster.state_dir)
        typer.echo(f"                             export PARAMSERVER_TOKEN=$(psctl token --state-dir {state})")
    typer.echo(_next(cluster) if detach else "Ctrl-C stops it")


def _next(cluster: Cluster) -> str:
    """Return the commands to type next, with the options that make them reach this cluster from here."""
    url = "" if cluster.is_at(client_settings({}).url) else f" --url {','.join(cluster.schedulers)}"
    own = state_dir(None).path == Path(cluster.state_dir)
    state = "" if own else f" --state-dir {shlex.quote(cluster.state_dir)}"
    return f"next: psctl status{url}, psctl new NAME, psctl down{state}"


def _watch(launched: launch.Launched) -> None:
    """Print the supervisor's warnings and errors until it ends.  Raises Failed if it failed."""
    with launched.state.log("supervisor").open("rb") as log:
        log.seek(0, 2)
        while launched.process.poll() is None:
            for line in new_lines(log):
                if " WARNING " in line or " ERROR " in line:
                    typer.echo(line, err=True)
            time.sleep(WATCH_S)
    if launched.process.returncode != 0:
        raise Failed(f"the cluster ended:\n{launched.state.tail('supervisor')}")


def down(state: StateDirOption = None) -> None:
    """Stop the cluster of a state directory and wait until its processes have ended; its data is kept.

    Exits with 1 if a shard could not store everything that only it held (docs/operations.md, "Stopping a shard").

    psctl down --state-dir /tmp/mine
    """
    folder = state_dir(state)
    if launch.stop(folder):
        if lost := launch.not_stored(folder):
            raise Failed(lost)
        typer.echo(f"the cluster under {folder.path} is down")
        return
    typer.echo(f"no cluster runs under {folder.path}")
    for other in _clusters():
        typer.echo(f"one runs elsewhere: psctl down --state-dir {shlex.quote(other.state_dir)}")


def _clusters() -> list[Cluster]:
    found = [s.cluster() for s in running()]
    return [c for c in found if c is not None]


def list_clusters(as_json: Json = False) -> None:
    """List your clusters that run on this machine; --json adds the current process ids.

    psctl list

    psctl list --json
    """
    clusters = _clusters()
    if as_json:
        print_list([keys.printable_cluster(c) for c in clusters])
        return
    if not clusters:
        typer.echo("no cluster of yours runs on this machine; psctl up starts one")
        return
    table = columns("scheduler", "shards", "redis", "state directory")
    for c in clusters:
        table.add_row(", ".join(c.schedulers), str(len(c.shards)), c.redis, c.state_dir)
    console().print(table)
