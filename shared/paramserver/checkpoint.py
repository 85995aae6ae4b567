"""Checkpoints on disk, to be kept, copied and loaded with other tools.

A checkpoint is a folder:

    manifest.json           format version, spec, versions, step counts, sha256 of every other file and of all this
    model.safetensors       every parameter under the user's name, in its shape and dtype
    optimizer.safetensors   optimizer state as `SLOT:NAME`, float32 values of float16 parameters as `master:NAME`
    workers.json            each worker's own state

`safetensors.numpy.load_file("model.safetensors")` opens the parameters.  NumPy has no bfloat16, so bfloat16 parameters
are stored as float32, which is exact.  The folder is written under a temporary name, synced, then renamed, so an
existing checkpoint is always complete.  One that is replaced is moved aside meanwhile; if that is interrupted, it is
read from there, until the next one has taken its place.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from paramserver import limits
from paramserver.core.spec import ModelSpec
from paramserver.errors import PsError, problem
from paramserver.tensor_file import TensorFile
from paramserver.types import F32, AnyArray
from paramserver.wire.tensor import HANDED_OUT

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
PARAMS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
WORKERS: Final = "workers.json"

_ABANDONED_S: Final = 86400.0
"""Age from which an unfinished folder is taken for that of a process that was killed: no write pauses for so long."""
_RESERVED: Final = "__metadata__"
"""The one key that a safetensors file cannot hold; a parameter of that name is stored with a '~' appended."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, read and verified."""

    spec: ModelSpec
    params: dict[str, F32]
    """float32 values in each parameter's shape, exactly as the shards held them."""
    slots: dict[str, list[F32]]
    """Optimizer state of each parameter, each array in the parameter's shape; empty for plain SGD."""
    steps: dict[str, int]
    """Updates that each parameter has had, from which Adam's bias correction goes on."""
    versions: list[int]
    """Version of each partition when the checkpoint was taken; all equal in sync."""
    worker_states: dict[str, Any]
    """Each worker's `w.state`, by worker id."""
    meta: dict[str, Any]
    """Additional members of the manifest, such as `clock`, `timeline`, `created_s` (Unix time)."""

    @property
    def version(self) -> int:
        """The highest version over the partitions, at which a restore continues; the manifest's is the lowest."""
        return max(self.versions, default=0)

    def states_in(self, model: str) -> dict[str, Any]:
        """Return the workers' states by the ids that they have in a model of that name, without those that are null."""
        own = f"{self.spec.name}/"
        named = {f"{model}/{w.removeprefix(own)}" if w.startswith(own) else w: s for w, s in self.worker_states.items()}
        return {w: s for w, s in named.items() if s is not None}


def write(
    path: str | os.PathLike[str],
    spec: ModelSpec,
    params: Mapping[str, AnyArray],
    slots: Mapping[str, Sequence[AnyArray]],
    steps: Mapping[str, int],
    versions: Sequence[int],
    worker_states: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
    confirm: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write a checkpoint to the folder `path` and return its manifest.

    Args:
        path: the folder to create; a missing parent is created too.
        spec: the model's spec.
        params: every parameter of the spec in its shape; any float dtype, float32 loses nothing.
        slots: for each parameter its optimizer state, each array float32 in the parameter's shape.
        steps: for each parameter the number of updates it has had (default 0).
        versions: the version of each partition.
        worker_states: JSON values by worker id.
        meta: additional JSON members of the manifest.
        overwrite: replace an existing folder, if it holds a manifest.
        confirm: called once all is written, before the folder is there; nothing is if it raises an error.

    Raises ConflictError (`conflict`) if `path` exists and may not be replaced, RequestError if the parameters do not
    fit the spec, OSError with a file name if writing fails.
    """
    target = _place(path)
    held, state = _arrays(spec, params, slots)
    existing = _folder(target)
    if existing.exists() and not (overwrite and (existing / MANIFEST).is_file()):
        raise problem("conflict", f"'{existing}' exists already", hint="choose another path, or allow overwriting")

    with _replacing(target, confirm) as part:
        _save(held, part / PARAMS, {"format": "np", "model": spec.name})
        _save(state, part / OPTIMIZER, {"format": "np"})
        # One by one, because nothing else in the process runs while one is encoded, and together they may take seconds.
        states = ", ".join([f"{json.dumps(w)}: {json.dumps(state)}" for w, state in worker_states.items()])
        (part / WORKERS).write_text(f"{{{states}}}", encoding="utf-8")
        manifest = {
            **meta,
            "format": FORMAT,
            "model": spec.name,
            "spec": spec.document(),
            "version": min(versions, default=0),
            "versions": list(versions),
            "steps": {p.name: int(steps.get(p.name, 0)) for p in spec.params},
            "slots": {p.name: len(slots.get(p.name, ())) for p in spec.params},
            "files": {name: _describe(part / name) for name in (PARAMS, OPTIMIZER, WORKERS)},
        }
        manifest["sha256"] = _digest(manifest)
        with open(part / MANIFEST, "w", encoding="utf-8") as f:
            json.dump(manifest, f, indent=1)
    return manifest


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, with this mode, and its parents unless they are there, so that they outlive a loss of power."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    for made in missing:
        _sync(made.parent)


@contextmanager
def _replacing(target: Path, confirm: Callable[[], None]) -> Iterator[Path]:
    """Yield a new folder to write files to, which then takes the place of `target`; after an error it is removed.

    `confirm` is called before, and may raise one.
    """
    make_folder(target.parent)
    for left in _beside(target, "part"):
        with suppress(OSError):  # another writer has finished it
            newest_s = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - newest_s > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        part.mkdir()
        yield part
        for file in part.iterdir():
            _sync(file)
        _sync(part)
        confirm()
        _rename(part, target)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(e, OSError):  # write and fsync name no file, other calls one in the removed folder
            e.filename = str(e.filename or target).replace(str(part), str(target))
        raise


def _arrays(
    spec: ModelSpec, params: Mapping[str, AnyArray], slots: Mapping[str, Sequence[AnyArray]]
) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
    """Return the contents of the files of parameters and of optimizer state; raises RequestError if they do not fit."""
    held: dict[str, AnyArray] = {}
    state: dict[str, AnyArray] = {}
    for p in spec.params:
        if p.name not in params:
            raise problem("unknown_parameter", f"the checkpoint lacks parameter '{p.name}'")
        value = params[p.name]
        if value.shape != p.shape:
            raise problem("invalid_shape", f"'{p.name}' has shape {value.shape}, the spec says {p.shape}")
        with np.errstate(over="ignore"):
            held[_key(p.name)] = _contiguous(value, HANDED_OUT[p.dtype])
        if p.dtype == "float16":
            state[f"master:{p.name}"] = _contiguous(value, np.float32)
        for i, slot in enumerate(slots.get(p.name, ())):
            if slot.shape != p.shape:
                raise problem("invalid_shape", f"optimizer state {i} of '{p.name}' has shape {slot.shape}")
            state[f"{i}:{p.name}"] = _contiguous(slot, np.float32)
    return held, state


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a checkpoint, without its arrays.

    Raises NotFoundError (`unknown_checkpoint`) if there is none, CorruptState (`corrupt_state`) if it is damaged or has
    another format, OSError with a file name if the OS refuses to read it.
    """
    file = _folder(_place(path)) / MANIFEST
    try:
        with _naming(file):
            data = file.read_bytes()
        manifest = json.loads(data.decode("utf-8"))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"format {manifest.get('format') if isinstance(manifest, dict) else None!r}")
        if manifest.get("sha256") != _digest(manifest):
            raise ValueError("it does not match its checksum")
    except (FileNotFoundError, NotADirectoryError):
        raise problem(
            "unknown_checkpoint", f"no checkpoint at '{file.parent}'", hint=f"it holds no {MANIFEST}"
        ) from None
    except (ValueError, IsADirectoryError) as e:
        raise problem("corrupt_state", f"'{file}' cannot be read as a manifest of format {FORMAT}: {e}") from e
    return manifest


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and verify every file against its checksum.

    Raises NotFoundError (`unknown_checkpoint`) if there is none, CorruptState (`corrupt_state`) naming the file that
    does not match, OSError with a file name if the OS refuses to read one that is there.
    """
    folder = _folder(_place(path))
    manifest = read_manifest(folder)
    try:
        for name in (PARAMS, OPTIMIZER, WORKERS):
            if _describe(folder / name) != manifest["files"][name]:
                raise problem("corrupt_state", f"'{folder / name}' does not match its checksum")
        spec = ModelSpec.parse(manifest["spec"])
        held = _load(folder / PARAMS)
        state = _load(folder / OPTIMIZER)
        params: dict[str, F32] = {}
        slots: dict[str, list[F32]] = {}
        for p in spec.params:
            value = state.get(f"master:{p.name}", held[_key(p.name)])
            params[p.name] = np.asarray(value, dtype=np.float32).reshape(p.shape)
            slots[p.name] = [
                np.asarray(state[f"{i}:{p.name}"], dtype=np.float32).reshape(p.shape)
                for i in range(manifest["slots"][p.name])
            ]
        versions = [_count(v) for v in manifest["versions"]]
        steps = {p.name: _count(manifest["steps"][p.name]) for p in spec.params}
        states = dict(json.loads((folder / WORKERS).read_text(encoding="utf-8")))
        known = {"format", "model", "spec", "version", "versions", "steps", "slots", "files", "sha256"}
        meta = {k: v for k, v in manifest.items() if k not in known}
        return Checkpoint(spec, params, slots, steps, versions, states, meta)
    except FileNotFoundError as e:
        raise problem("corrupt_state", f"'{e.filename}' is missing") from e
    except _DAMAGE as e:
        raise problem("corrupt_state", f"the checkpoint at '{folder}' is damaged: {e!r:.200}") from e
    except PsError as e:
        if e.code == "corrupt_state":
            raise
        raise problem("corrupt_state", f"the checkpoint at '{folder}' has a spec that cannot be read: {e}") from e


_DAMAGE: Final = (KeyError, TypeError, ValueError, NotADirectoryError, IsADirectoryError)
"""What reading damaged files raises.  Other OSErrors, such as a lack of permission, say nothing about the files."""


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= limits.VERSION_MAX:
        raise ValueError(f"version or step count {value!r:.40}")
    return value


def _key(name: str) -> str:
    return f"{name}~" if name.rstrip("~") == _RESERVED else name


def _load(file: Path) -> dict[str, AnyArray]:
    with TensorFile(file) as tensors:
        return {name: tensors.read(name) for name in tensors.shapes}


def _save(tensors: dict[str, AnyArray], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as e:
        # safetensors reports I/O errors such as a full disk this way, with the errno only in the text.
        found = re.search(r"\(os error (\d+)\)", str(e))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(e), str(file)) from e


def _contiguous(value: AnyArray, dtype: Any) -> AnyArray:
    return np.array(value, dtype=dtype, order="C", copy=None)


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's members, all but the checksum itself, in their order."""
    return hashlib.sha256(json.dumps({k: v for k, v in manifest.items() if k != "sha256"}).encode()).hexdigest()


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Give an OSError about this file its name, which a failed read lacks."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(file)
        raise


def _describe(file: Path) -> dict[str, Any]:
    with _naming(file), open(file, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"bytes": f.tell(), "sha256": digest}


def _sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    if os.name == "nt" and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(part: Path, target: Path) -> None:
    """Rename `part` to `target`; a previous `target` is deleted once the new one is in place."""
    if target.exists():
        _put_away(target)  # what a killed process has left there is older
        target.rename(part.with_suffix(".old"))
    part.rename(target)
    _put_away(target)  # before the sync, which may take long: the journal of a file system keeps the order of renames
    _sync(target.parent)
    for gone in _beside(target, "gone"):  # also what an interrupted deletion has left
        shutil.rmtree(gone, ignore_errors=True)


def _put_away(target: Path) -> None:
    """Rename what `target` was moved to, so that it is not taken for the checkpoint, even if it is never deleted."""
    for old in _beside(target, "old"):
        old.rename(old.with_suffix(".gone"))


def _beside(target: Path, suffix: str) -> list[Path]:
    """Return the folders that `target` was moved to, with that suffix."""
    return sorted(target.parent.glob(f".{escape(target.name)}.{'[0-9a-f]' * 8}.{suffix}"))


def _place(path: str | os.PathLike[str]) -> Path:
    """Return `path`, or where it leads if it is a link: a new folder must not take the place of the link."""
    target = Path(path)
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _folder(target: Path) -> Path:
    """Return `target`, or the folder that it was moved to when its replacement was interrupted."""
    return target if target.exists() else next(iter(_beside(target, "old")), target)
