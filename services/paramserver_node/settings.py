"""Settings of every service: flags override the environment (`PARAMSERVER_…`), which overrides `paramserver.toml`.

The file's top level applies to every service, a table to one: `[scheduler]`, `[shard]`, `[worker]`, `[client]`.
`PARAMSERVER_…_FILE` names a file that holds the value, so that a secret is neither in the environment nor on a command
line.  `docs/settings.md` lists all settings; a test checks that.
"""

import os
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Self, get_type_hints

from paramserver import limits
from paramserver.core.near import near
from paramserver.core.scheduler.runs import ALLOWED_BY_DEFAULT
from paramserver.core.urls import DEFAULT_URL, is_node_url
from paramserver.errors import RequestError, problem
from paramserver.net.credentials import text_of
from paramserver_node import crash
from paramserver_node.setting_checks import check, shown

PREFIX: Final = "PARAMSERVER_"
FILE: Final = "paramserver.toml"
_BOOLS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class Settings:
    """Base class of a program's settings, which loads them from their sources."""

    section: ClassVar[str] = ""
    """The program's own table in `paramserver.toml`."""

    @classmethod
    def sources(cls, flags: Mapping[str, Any], env: Mapping[str, str], file: Path) -> dict[str, tuple[Any, str]]:
        """Return the effective value of each setting, as (value, where it comes from).

        Raises RequestError: `invalid_field` for a value of the wrong type or form, an unknown key, a file that cannot
        be read, or an empty file of a secret; `malformed` for a file that is not TOML.
        """
        common, own = _tables(file, cls.section)
        types = get_type_hints(cls)
        out: dict[str, tuple[Any, str]] = {}
        for f in fields(cls):
            variable = PREFIX + f.name.upper()
            if flags.get(f.name) is not None:
                value, origin = flags[f.name], f"--{f.name.replace('_', '-')}"
            elif env.get(variable) or (variable in env and f.metadata.get("empty")):
                value, origin = env[variable], variable
            elif env.get(variable + "_FILE"):
                origin = variable + "_FILE"
                value = text_of(env[origin], origin).strip()
                if f.name == "secret" and not value:  # it would count as none, with which a node asks for no token
                    hint = "psctl secret prints a key to put into it; every node has the same"
                    raise problem("invalid_field", f"{origin}: {env[origin]} is empty", hint=hint)
            elif f.name in own:
                value, origin = own[f.name], f"{file} [{cls.section}]"
            elif f.name in common:
                value, origin = common[f.name], str(file)
            else:
                value, origin = f.default, "default"
            value = _converted(value, types[f.name], f.name, origin)
            check(cls.section, f.name, value, origin)
            out[f.name] = (value, origin)
        return out

    @classmethod
    def load(cls, flags: Mapping[str, Any]) -> Self:
        """Return the settings from `flags` (None: not given), the environment, and `paramserver.toml` here."""
        found = cls.sources(flags, os.environ, Path.cwd() / FILE)
        return cls(**{name: value for name, (value, _) in found.items()})


@dataclass(frozen=True, slots=True)
class NodeSettings(Settings):
    """Settings of schedulers and shards: where they listen, and whom they admit."""

    log_level: str = "INFO"
    host: str = "127.0.0.1"
    secret: str = ""
    """Key that tokens are made with, the same for every node; one on a second line is accepted too.  Best in a file."""
    revoked: str = ""
    """Names of tokens that are no longer accepted, separated by commas."""
    insecure: bool = False
    """Serve other machines without tokens."""
    tls_certificate: str = ""
    """File with the certificate chain (PEM); the port then serves HTTPS."""
    tls_key: str = ""
    """File with its private key (PEM)."""
    ca: str = ""
    """File with certificates (PEM) to trust, in addition to the system's, when calling other nodes."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings(NodeSettings):
    """Settings of a scheduler."""

    section = "scheduler"

    name: str = ""
    """Name among several schedulers; default: host name and port."""
    port: int = 8700
    redis: str = "redis://127.0.0.1:6379/0"
    state_dir: str = ".paramserver"
    """Folder of server-side checkpoints, and of files for `init.kind: file`."""
    advertise: str = ""
    """URL at which others reach it; default: the address it listens on, or the host name if it listens on all."""
    expect_state: bool = False
    """Refuse to start on an empty Redis, which must be the wrong one or have lost its data."""
    page_url: str = ""
    """URL at which people reach the status page, for the printed link; default: the advertised one."""


@dataclass(frozen=True, slots=True)
class ShardSettings(NodeSettings):
    """Settings of a shard."""

    section = "shard"

    name: str = ""
    """Stable identity; default: host name and port."""
    port: int = 8701
    scheduler: str = DEFAULT_URL
    """URL of the scheduler; several separated by commas."""
    redis: str = "redis://127.0.0.1:6379/0"
    advertise: str = ""
    """URLs at which workers and shards reach it, separated by commas; default as for a scheduler."""
    snapshot_mib_per_s: float = 64.0
    """Budget for snapshot writes."""
    stop_s: float = limits.STOP_S
    """Longest time from a request to stop to the end of the process; what kills it must wait longer."""
    expect_state: bool = False
    """Refuse to start on an empty Redis, which must be the wrong one or have lost its data."""
    memory_limit: str = ""
    """Memory that the process may use, as 8GiB or in bytes; default: that of its container, else of the machine."""
    shared_memory: str = field(default="/dev/shm", metadata={"empty": "none, not the default"})
    """Folder in memory through which clients on this machine push and pull without copies; empty: none."""


@dataclass(frozen=True, slots=True)
class CallerSettings(Settings):
    """Settings of programs that call a cluster."""

    url: str = DEFAULT_URL
    """URL of the cluster; several separated by commas, for failover."""
    token: str = ""
    """Sent as a bearer token.  Best in a file, or in the environment."""
    ca: str = ""
    """File with certificates (PEM) to trust, in addition to the system's."""


@dataclass(frozen=True, slots=True)
class WorkerSettings(CallerSettings):
    """Settings of `paramserver-worker`."""

    section = "worker"

    log_level: str = "INFO"
    name: str = ""
    """Unique name in the pool; default: host name, process id and a random part."""
    allow: str = ALLOWED_BY_DEFAULT
    """Prefixes of the modules it may run, separated by commas."""


@dataclass(frozen=True, slots=True)
class ClientSettings(CallerSettings):
    """Settings of psctl's calls to a cluster."""

    section = "client"

    timeout_s: float = 30.0
    state_dir: str = ".paramserver"
    secret: str = ""
    """The nodes' secret, if available: psctl makes its own token with it."""


SERVICES: Final[tuple[type[Settings], ...]] = (
    SchedulerSettings,
    ShardSettings,
    WorkerSettings,
    ClientSettings,
)


def unknown_variables(env: Mapping[str, str]) -> str:
    """Return the names of the `PARAMSERVER_` variables that no program reads, with the ones that were meant, or ''.

    They are told, not refused as in the file: on Kubernetes a Service may bring variables of that prefix by itself.
    """
    settings = [f.name.upper() for service in SERVICES for f in fields(service)]
    known = {*settings, *(f"{name}_FILE" for name in settings)}
    told = []
    for name in sorted(n.removeprefix(PREFIX) for n in env if n.startswith(PREFIX) and n != crash.VARIABLE):
        if name not in known:
            meant = near(name, known)
            told.append(f"{PREFIX}{name:.60}" + (f" (did you mean {PREFIX}{meant}?)" if meant else ""))
    return ", ".join(told)


SECRETS: Final = frozenset({"secret", "token"})
"""Settings whose values are never printed."""


def redacted(name: str, value: Any) -> str:
    """Return the value of the setting `name` for printing, with secrets masked."""
    return "***" if name in SECRETS and value else shown(value)


def exit_status(error: BaseException) -> int:
    """Return the exit status of a service: 2 for invalid settings, as for an unknown flag, else 1."""
    return 2 if isinstance(error, RequestError) else 1


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL at which others reach a server on `host`: with the host name if it listens on all addresses.

    Raises RequestError (`invalid_field`) if nobody could: the port is 0, or the host name is not valid in a URL.
    """
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    scheme = "https" if tls else "http"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    if not is_node_url(url):
        raise problem("invalid_field", f"advertise: must be set, as nobody can connect to {url!r:.200}")
    return url


def _tables(file: Path, section: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return (top level, the section's table) of the file; both are empty if there is no file."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # editors on Windows begin files with a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        # The hint is not `psctl config`, which would fail on the same file.
        raise problem("malformed", f"{file}: {e}", hint="its settings are listed in docs/settings.md") from None
    except FileNotFoundError:
        return {}, {}
    except OSError as e:
        hint = "allow this user to read it, or start in another folder"
        raise problem("invalid_field", f"{file}: cannot be read: {e.strerror}", hint=hint) from None
    known = {s.section: {f.name for f in fields(s)} for s in SERVICES}
    tables = {name: found.pop(name) for name in known if name in found}
    _check_names(set(found), set().union(*known.values(), known), str(file))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise problem("invalid_field", f"{file}: {name} must be a table, [{name}]")
        _check_names(set(table), known[name], f"{file} [{name}]")
    return found, tables.get(section, {})


def _check_names(names: set[str], known: set[str], where: str) -> None:
    for name in sorted(names - known):
        meant = near(name, known)
        hint = f"did you mean '{meant}'?" if meant else f"known: {', '.join(sorted(known))}"
        raise problem("invalid_field", f"{where}: unknown setting '{name:.60}'", hint=hint)


def _converted(value: Any, kind: type, name: str, origin: str) -> Any:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is bool and str(value).lower() in _BOOLS:
        return _BOOLS[str(value).lower()]
    try:
        if kind is str and isinstance(value, list):
            return ("\n" if name == "secret" else ",").join(map(str, value))
        if kind in (int, float) and isinstance(value, str | int) and not isinstance(value, bool):
            return kind(value)
        if kind is str and isinstance(value, Path | int | float) and not isinstance(value, bool):
            return str(value)
    except (ValueError, OverflowError):
        pass
    text = redacted(name, value)
    raise problem("invalid_field", f"{name} (from {origin}): must be of type {kind.__name__}, not {text!r:.60}")
