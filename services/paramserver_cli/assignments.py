"""Settings on a command line, such as `lr=0.05 mode=ssp staleness=2`, as a JSON merge patch."""

from collections.abc import Iterable
from typing import Any, Final

import typer
from msgspec.structs import fields

from paramserver.core.near import near
from paramserver.core.optimizer_spec import OptimizerSpec
from paramserver.core.spec import CheckpointSpec, ConsistencySpec
from paramserver_node.words import pairs

_SECTIONS: Final = {
    "optimizer": {f.name for f in fields(OptimizerSpec)} - {"name"},
    "consistency": {f.name for f in fields(ConsistencySpec)},
    "checkpoint": {f.name for f in fields(CheckpointSpec)},
}
_NAMED: Final = {"optimizer": "name", "consistency": "mode"}
"""Sections that are meant by their first field if they are set to a word: `optimizer=adam`."""
_TOP: Final = {"evaluate_every", "params"}


def spec_patch(texts: Iterable[str]) -> dict[str, Any]:
    """Return the merge patch of a model's spec for NAME=VALUE words.

    A name without its section goes into the one that has such a field; `optimizer.lr=…`, `optimizer=adam` and
    `consistency=sync` work, too.  `params.0.weight.lr_scale=…` is a field of the parameter '0.weight', and
    `params.0.weight={…}` several of them.  Raises BadParameter (exit code 2) for an unknown name, or a name within a
    value that another word sets.
    """
    patch: dict[str, Any] = {}
    for name, right in pairs(texts).items():
        section, dot, rest = name.partition(".")
        if dot:
            *path, last = _path(section, rest, right)
            target = patch
            for part in path:
                target = target.setdefault(part, {})
                if not isinstance(target, dict):
                    raise typer.BadParameter(f"'{name}' is part of a setting that another word sets to {target!r}")
            target[last] = right
        elif name in _NAMED:
            patch.setdefault(name, {})[_NAMED[name]] = right
        elif name in _TOP:
            patch[name] = right
        else:
            owner = _section_of(name)
            if owner is None:
                known = sorted({*_NAMED, *_TOP}.union(*_SECTIONS.values()))
                meant = near(name, known)
                hint = f"did you mean '{meant}'?" if meant else f"known: {', '.join(known)}"
                raise typer.BadParameter(f"'{name}' is not a setting of a model; {hint}")
            patch.setdefault(owner, {})[name] = right
    return patch


def _section_of(field: str) -> str | None:
    """Return the section that has such a field; None if none has."""
    return next((section for section, names in _SECTIONS.items() if field in names), None)


def _path(section: str, rest: str, value: Any) -> list[str]:
    """Return the keys in a spec that lead to the setting `section.rest`."""
    if section == "params":  # whose names may have dots
        name, dot, key = (rest, "", "") if isinstance(value, dict) else rest.rpartition(".")
        return [section, name, key] if dot else [section, rest]
    owner = _section_of(section)
    return [*([owner] if owner else []), section, *rest.split(".")]
