"""Checkpoints in the state directory: written from the shards' partitions, restored into any model.

`STATE_DIR/checkpoints/MODEL/NAME/` is one checkpoint (see `paramserver.checkpoint`).  Both names are single path
components, checked here, so no name received over the network leads out of the state directory.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from paramserver import checkpoint
from paramserver.core.assembly import gather, scatter, versions
from paramserver.core.fields import check_model_name
from paramserver.core.layout import Layout
from paramserver.core.partition_state import PartitionState
from paramserver.core.scheduler.checkpoints import ALIASES
from paramserver.core.selection import select
from paramserver.core.spec import ModelSpec
from paramserver.errors import CorruptState, NotFoundError, PsError, problem
from paramserver.tensor_file import TensorFile
from paramserver.types import F32, AnyArray
from paramserver.wire.state import SetFrame, SetPart, StateFrame, taken_out

log = logging.getLogger("paramserver.scheduler")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_AUTOMATIC: Final = re.compile(r"([0-9]{6,})-clock-[0-9]+")
"""A name that the scheduler chose, with the number of the checkpoint."""


def check_name(name: Any) -> str:
    """Return the name if it is valid for a checkpoint or file; raises RequestError (`invalid_field`) otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise problem(
            "invalid_field",
            f"checkpoint name {name!r:.80} is not allowed",
            hint="letters, digits, '.', '_' and '-', starting with a letter or digit, at most 128",
        )
    return name


class CheckpointStore:
    """The checkpoints of one state directory.  All methods block: call them in a thread."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "checkpoints"

    def path(self, model: str, name: str) -> Path:
        """Return the folder of a checkpoint; raises RequestError for an invalid name."""
        return self._root / check_model_name(model) / check_name(name)

    def new_path(self, model: str, name: str) -> Path:
        """Like `path`, of a folder that is to be written: all are below one that only this user can read."""
        path = self.path(model, name)
        checkpoint.make_folder(self._root, 0o700)
        return path

    def write(
        self,
        model: str,
        name: str,
        document: Mapping[str, Any],
        held: list[tuple[StateFrame, PartitionState]],
        confirm: Callable[[], None] = lambda: None,
    ) -> tuple[int, str]:
        """Write a checkpoint and return (bytes of its files, its path).

        `document` is the one of the effect `WriteCheckpoint`; `held` is empty afterwards.  An existing checkpoint of
        that name is replaced if it is of the same creation of the model: then the scheduler was restarted before it had
        recorded that one.  `confirm` is called just before that, and what it raises leaves everything as it was.

        Raises PsError, including ConflictError (`conflict`) if the name is `taken`, or OSError if writing fails.
        """
        spec = ModelSpec.parse(document["spec"])
        numbers = [frame.version for frame, _ in held]
        params, slots, steps = gather(Layout(spec), taken_out(held, spec.optimizer))
        workers = {w: d.get("state") for w, d in document["workers"].items()}
        meta = {k: v for k, v in document.items() if k != "spec"}
        meta["workers"] = {w: {k: v for k, v in d.items() if k != "state"} for w, d in document["workers"].items()}
        path = self.new_path(model, name)
        free = not self.taken(model, name, document["creation"])
        manifest = checkpoint.write(
            path, spec, params, slots, steps, numbers, workers, meta, overwrite=free, confirm=confirm
        )
        return sum(f["bytes"] for f in manifest["files"].values()), str(path)

    def taken(self, model: str, name: str, creation: str) -> bool:
        """Whether a folder of that name exists that this creation of the model did not write."""
        path = self.path(model, name)
        return path.exists() and _creation(path) != creation

    def remove(self, model: str, name: str, creation: str | None) -> None:
        """Delete a checkpoint if it exists and is of that creation of the model (None: of any), or unreadable."""
        path = self.path(model, name)
        if path.is_dir() and (creation is None or _creation(path) in (creation, "")):
            # Rename first, so that an interrupted deletion leaves no partial checkpoint under its name.
            gone = path.with_name(f".{path.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            with suppress(FileNotFoundError):  # another request is deleting it, too
                path.rename(gone)
            discard(gone)

    def exists(self, model: str, name: str) -> bool:
        """Whether a folder of that name exists, of any creation of the model."""
        return self.path(model, name).is_dir()

    def sweep(self) -> None:
        """Remove the partly written or deleted folders of a process that was killed.

        A checkpoint that it had moved aside (`checkpoint.write`) gets its name back if the new one is not in its place.
        Raises OSError if the folder cannot be read.
        """
        for path in self._root.glob("*/.*"):
            name = path.with_name(path.name[1:].rsplit(".", 2)[0])
            if path.suffix == ".old" and not name.exists():
                with suppress(OSError):  # a folder that refuses this must not keep the others from being swept
                    path.rename(name)
            elif path.suffix in (".part", ".old", ".gone"):
                discard(path)

    def prune(self, models: Iterable[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> None:
        """Remove what the rule of `keep` has removed from the lists of these (model, its creation, its checkpoints).

        These are automatic checkpoints of that creation that are not listed and are older than the newest listed one.
        Newer ones stay: a Redis that has lost its last writes does not list them.
        """
        for model, creation, listed in models:
            names = {c["name"] for c in listed}
            newest = max((c["number"] for c in listed if not c["kept"]), default=0)
            for path in (self._root / model).glob("[0-9]*"):
                number = _AUTOMATIC.fullmatch(path.name)
                if number and int(number[1]) < newest and path.name not in names and _creation(path) == creation:
                    log.info("checkpoint.pruned model=%s name=%s", model, path.name)
                    self.remove(model, path.name, creation)

    def find(self, model: str, name: str) -> Path:
        """Return the folder of the checkpoint with that name, or of the `latest` or `best` one.

        Raises NotFoundError (`unknown_checkpoint`) if there is none, CorruptState if for `latest` or `best` a manifest
        cannot be read that may be its.
        """
        if name not in ALIASES:
            return self._called(model, name)
        manifests: list[tuple[Path, dict[str, Any]]] = []
        for path in (self._root / check_model_name(model)).glob("[!.]*"):
            try:
                manifests.append((path, checkpoint.read_manifest(path)))
            except NotFoundError:  # a folder of something else
                continue
            except CorruptState as e:
                what = f"{e.detail}; so which one is {name} is not known"
                raise problem(e.code, what, hint="restore one by its name, or move the damaged one away") from e
        if name == "best":
            manifests = [(p, m) for p, m in manifests if isinstance(m.get("metric"), dict)]
        if not manifests:
            raise problem("unknown_checkpoint", f"model '{model}' has no {name} checkpoint")
        return max(manifests, key=_score if name == "best" else _created)[0]

    def _called(self, model: str, name: str) -> Path:
        path = self.path(model, name)
        if not (path / checkpoint.MANIFEST).is_file():
            raise problem("unknown_checkpoint", f"model '{model}' has no checkpoint '{name}'")
        return path

    def file(self, model: str, name: str, file: str, creation: str | None) -> Path | None:
        """Return the path of a file; None if it is missing or not of that creation of the model (None: of any)."""
        path = self.path(model, name)
        return path / file if (path / file).is_file() and _of(path, creation) else None

    def read(self, model: str, name: str, creation: str | None = None) -> checkpoint.Checkpoint:
        """Read and verify a checkpoint.

        If `creation` is given, `name` must be the checkpoint's own; if None, `find` locates it.  Raises NotFoundError,
        CorruptState, or ConflictError (`conflict`) if it is of another creation of the model.
        """
        path = self.find(model, name) if creation is None else self._called(model, name)
        held = checkpoint.read(path)
        if not _of(path, creation):
            raise of_another(name, path)
        return held

    def read_parameters(self, layout: Layout, files: Mapping[str, str]) -> dict[str, F32]:
        """Read initial values, flat in float32, from safetensors files in the state directory.

        `files` is {parameter: file name}.  Raises RequestError if a file or its tensor is missing or cannot be read,
        has another shape, or holds NaN or infinity.
        """
        values: dict[str, F32] = {}
        by_file: dict[str, list[str]] = {}
        for name, file in files.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            name = names[0]
            try:
                with TensorFile(self._state_dir / check_name(file)) as f:
                    for name in names:
                        values[name] = _initial(f, file, name, layout.by_name[name].shape)
            except (OSError, ValueError) as e:
                raise problem(
                    "invalid_field",
                    f"params.{name}.init.path: '{file}' cannot be read: {e!s:.200}",
                    hint="a safetensors file directly below the scheduler's state directory",
                ) from e
        return values


def discard(folder: Path) -> None:
    """Delete a folder of a model's, and the model's own if that is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it has other checkpoints
        folder.parent.rmdir()


def _initial(held: TensorFile, file: str, name: str, want: tuple[int, ...]) -> F32:
    """Read one parameter's initial values, flat; raises like `read_parameters`, ValueError and OSError."""
    if name not in held.shapes:
        raise problem("unknown_parameter", f"file '{file}' has no tensor '{name}'", name=name)
    shape = held.shapes[name]
    if shape != want:
        raise problem("invalid_shape", f"'{name}' is {shape} in file '{file}', the spec says {want}")
    values = np.asarray(held.read(name), np.float32).reshape(-1)
    if not np.isfinite(values).all():
        raise problem("non_finite", f"'{name}' in file '{file}' holds NaN or infinity")
    return values


def of_another(name: str, path: Path) -> PsError:
    """Return the error for a name that another creation of the model uses on this disk, in that folder."""
    return problem(
        "conflict",
        f"checkpoint '{name}' exists and belongs to an earlier model of the same name: {path}",
        hint="choose another name, or delete it first",
    )


def _creation(path: Path) -> str:
    """Return the creation of the model that a checkpoint is of; "" if its manifest names none or cannot be read."""
    try:
        return str(checkpoint.read_manifest(path).get("creation", ""))
    except PsError:
        return ""


def _of(path: Path, creation: str | None) -> bool:
    """Whether a checkpoint is of that creation of its model (None: always)."""
    return creation is None or _creation(path) == creation


def renamed(spec: ModelSpec, name: str, partitions: int | None) -> dict[str, Any]:
    """Return the spec of a new model into which a checkpoint of `spec` is restored."""
    document = replace(spec, name=name).document()
    if partitions is not None:
        document["partitions"] = partitions
    return document


def partition(held: checkpoint.Checkpoint, spec: ModelSpec) -> list[tuple[PartitionState, int]]:
    """Return a checkpoint as (state, lowest version) of each partition of a model with that spec.

    Afterwards the checkpoint has no arrays.  Raises RequestError if its parameters do not match the spec.
    """
    layout = Layout(spec)
    states = scatter(layout, held.params, held.slots, held.steps, held.spec.optimizer)
    return list(zip(states, versions(layout, Layout(held.spec), held.versions), strict=True))


def assignments(
    layout: Layout, generation: int, values: Mapping[str, F32]
) -> dict[int, tuple[SetFrame, Sequence[AnyArray]]]:
    """Return, for each partition touched, the frame that sets these flat first values, and its body."""
    frames: dict[int, tuple[SetFrame, Sequence[AnyArray]]] = {}
    chosen = select(layout, values)
    for p in chosen.parts:
        pieces = [values[chosen.params[i.param].name][i.source : i.source + i.length] for i in p.pieces]
        part = SetPart(p.partition, p.stop - p.start, p.ranges, "float32")
        frames[p.partition] = (SetFrame(layout.spec.name, generation, (part,), first=True), pieces)
    return frames


def _created(entry: tuple[Path, Mapping[str, Any]]) -> float:
    return float(entry[1].get("created_s", 0.0))


def _score(entry: tuple[Path, Mapping[str, Any]]) -> tuple[float, float]:
    manifest = entry[1]
    sign = 1.0 if manifest["spec"]["checkpoint"]["best"] == "max" else -1.0
    return sign * float(manifest["metric"]["value"]), -_created(entry)
