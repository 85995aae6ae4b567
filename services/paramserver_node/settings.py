"""Settings of every service: a flag wins over the environment (`PARAMSERVER_…`), that over `paramserver.toml`."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self, get_type_hints

from paramserver.errors import problem

PREFIX: Final = "PARAMSERVER_"
FILE: Final = "paramserver.toml"


@dataclass(frozen=True, slots=True)
class Settings:
    """What every service takes."""

    log_level: str = "INFO"

    @classmethod
    def sources(cls, flags: Mapping[str, Any], env: Mapping[str, str], file: Path) -> dict[str, tuple[Any, str]]:
        """The effective value of each setting, as (value, where it comes from).

        Raises RequestError (`invalid_field`) naming a value that has the wrong type, and `malformed` for a file that is
        not TOML.
        """
        table: Mapping[str, Any] = {}
        if file.is_file():
            try:
                table = tomllib.loads(file.read_text())
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
                raise problem("malformed", f"{file}: {e}", hint="see `psctl config --help`") from None
        types = get_type_hints(cls)
        out: dict[str, tuple[Any, str]] = {}
        for f in fields(cls):
            variable = PREFIX + f.name.upper()
            if flags.get(f.name) is not None:
                value, origin = flags[f.name], f"--{f.name.replace('_', '-')}"
            elif env.get(variable):
                value, origin = env[variable], variable
            elif f.name in table:
                value, origin = table[f.name], str(file)
            else:
                value, origin = f.default, "default"
            out[f.name] = (_converted(value, types[f.name], f.name, origin), origin)
        return out

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, *, folder: Path | None = None) -> Self:
        """The settings of this process: flags (None: not given), the environment, `paramserver.toml` in `folder`."""
        found = cls.sources(flags or {}, os.environ, (folder or Path.cwd()) / FILE)
        return cls(**{name: value for name, (value, _) in found.items()})


@dataclass(frozen=True, slots=True)
class SchedulerSettings(Settings):
    """Settings of a scheduler."""

    host: str = "127.0.0.1"
    port: int = 8700
    redis: str = "redis://127.0.0.1:6379/0"
    state_dir: str = ".paramserver"
    """Folder of server-side checkpoints and of files for `init.kind: file`."""
    advertise: str = ""
    """URL under which others reach it; default: what it is bound to."""


@dataclass(frozen=True, slots=True)
class ShardSettings(Settings):
    """Settings of a shard."""

    name: str = ""
    """Stable identity; default: host name and port."""
    host: str = "127.0.0.1"
    port: int = 8701
    scheduler: str = "http://127.0.0.1:8700"
    """URL of the scheduler; several separated by commas."""
    redis: str = "redis://127.0.0.1:6379/0"
    state_dir: str = ".paramserver"
    advertise: str = ""
    """URLs under which workers and shards reach it, separated by commas; default: what it is bound to."""
    snapshot_mib_per_s: float = 64.0
    """Budget of snapshot writes."""


@dataclass(frozen=True, slots=True)
class ClientSettings(Settings):
    """Settings of psctl, workers and the SDK."""

    url: str = "http://127.0.0.1:8700"
    """Where the cluster is; several separated by commas, for fail-over."""
    timeout_s: float = 30.0
    state_dir: str = ".paramserver"


def _converted(value: Any, kind: type, name: str, origin: str) -> Any:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    try:
        if kind is str and isinstance(value, list):
            return ",".join(map(str, value))
        if kind in (int, float) and isinstance(value, str | int | float):
            return kind(value)
        if kind is str and isinstance(value, Path | int | float):
            return str(value)
    except ValueError:
        pass
    raise problem("invalid_field", f"{name} (from {origin}) must be of type {kind.__name__}, not {value!r:.60}")
