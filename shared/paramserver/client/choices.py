"""What optimizers, schedules and consistency modes have in common: one of several, each with settings of its own."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from paramserver.errors import problem


@dataclass(frozen=True, slots=True)
class Choice:
    """Base class of `Optimizer`, `Schedule` and `Consistency`, whose subclasses are what can be chosen."""

    tag: ClassVar[str]
    """Member of the JSON object that names the choice; also the name of the class variable with its value."""

    def __new__(cls, *args: object, **given: object) -> Self:
        """Raise RequestError (`invalid_field`) for arguments that it does not take; `__init__` sets the others."""
        ordered = [f.name for f in fields(cls) if not f.kw_only]
        named = [f.name for f in fields(cls) if f.kw_only]
        stray = [name for name in given if name not in (*ordered, *named)]
        if stray or len(args) > len(ordered):
            takes = " and ".join(filter(None, [", ".join(ordered), f"by name {', '.join(named)}"]))
            what = ", ".join(stray) or f"{args[len(ordered)]!r:.40} without a name"
            family: Any = cls.mro()[1]
            siblings = {c.__name__: c for c in family.__subclasses__()}
            others = [f"ps.{n}" for n, c in siblings.items() if stray and stray[0] in c.__dataclass_fields__]
            hint = f"{stray[0]} is a setting of {', '.join(others)}" if others else ""
            raise problem("invalid_field", f"ps.{cls.__name__} takes {takes}; not {what}", hint=hint)
        return object.__new__(cls)

    def document(self) -> dict[str, Any]:
        """Return the JSON object of this choice."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        return {self.tag: getattr(self, self.tag), **{name: _in_json(value) for name, value in settings.items()}}


def _in_json(value: Any) -> Any:
    if isinstance(value, Choice):
        return value.document()
    return list(value) if isinstance(value, tuple) else value
