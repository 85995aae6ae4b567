"""Checkpoint folders: compatibility with other tools, and detection of damaged files."""

import errno
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.refusals import refused_with

from paramserver import checkpoint
from paramserver.core.spec import ModelSpec
from paramserver.errors import CorruptState, PsError


def _spec() -> ModelSpec:
    return ModelSpec.parse(
        {
            "name": "demo",
            "params": {
                "dense/kernel": {"shape": [3, 4]},
                "half": {"shape": [5], "dtype": "float16"},
                "brain": {"shape": [2, 1], "dtype": "bfloat16"},
                "double": {"shape": [], "dtype": "float64"},
                "__metadata__": {"shape": [2]},
            },
            "optimizer": {"name": "adam"},
        }
    )


def _params(spec: ModelSpec) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {p.name: np.asarray(rng.standard_normal(p.shape), np.float32) for p in spec.params}


def _write(path: Path, **more: Any) -> tuple[ModelSpec, dict[str, Any], dict[str, list[Any]]]:
    spec = _spec()
    params = _params(spec)
    slots = {n: [v * 2, v * v] for n, v in params.items()}
    checkpoint.write(path, spec, params, slots, {"half": 7}, [3, 4], {"run-1/w0": {"epoch": 2}}, {"clock": 9}, **more)
    return spec, params, slots


def _change(manifest: Path, **members: Any) -> None:
    """Give a manifest other members, and the checksum of what it has then."""
    held = json.loads(manifest.read_text()) | members
    del held["sha256"]
    digest = hashlib.sha256(json.dumps(held).encode()).hexdigest()
    manifest.write_text(json.dumps(held | {"sha256": digest}))


def test_round_trip(tmp_path: Path) -> None:
    """Everything written is read back bit for bit, including values that are narrower on disk than in memory."""
    spec, params, slots = _write(tmp_path / "a" / "ckpt")

    got = checkpoint.read(tmp_path / "a" / "ckpt")

    assert got.spec == spec
    assert got.versions == [3, 4]
    assert got.steps["half"] == 7
    assert got.steps["double"] == 0
    assert got.worker_states == {"run-1/w0": {"epoch": 2}}
    assert got.meta == {"clock": 9}
    for name, value in params.items():
        np.testing.assert_array_equal(got.params[name], value)
        for read, wrote in zip(got.slots[name], slots[name], strict=True):
            np.testing.assert_array_equal(read, wrote)


def test_new_parents_of_a_checkpoint_are_on_disk_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder that a checkpoint's new parents are in is synced, too: it would be lost with any of them."""
    synced = list[Path]()
    sync = checkpoint._sync

    def noting(path: Path) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(checkpoint, "_sync", noting)

    _write(tmp_path / "a" / "b" / "c")

    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)
    assert {synced.index(tmp_path), synced.index(tmp_path / "a")} == {0, 1}


def test_parameters_open_with_safetensors(tmp_path: Path) -> None:
    """safetensors itself opens the parameters, with the user's names, shapes and dtypes (bfloat16 as float32)."""
    _, params, _ = _write(tmp_path / "ckpt")

    held = load_file(tmp_path / "ckpt" / checkpoint.PARAMS)

    assert {n: (v.shape, v.dtype.name) for n, v in held.items()} == {
        "dense/kernel": ((3, 4), "float32"),
        "half": ((5,), "float16"),
        "brain": ((2, 1), "float32"),
        "double": ((), "float64"),
        "__metadata__~": ((2,), "float32"),
    }
    np.testing.assert_array_equal(held["dense/kernel"], params["dense/kernel"])


@pytest.mark.parametrize("name", [checkpoint.PARAMS, checkpoint.OPTIMIZER, checkpoint.WORKERS])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    """A file that has changed since it was written is refused as `corrupt_state`, by name."""
    _write(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    with refused_with("corrupt_state", match=name):
        checkpoint.read(tmp_path / "ckpt")


@pytest.mark.parametrize("name", [checkpoint.PARAMS, checkpoint.OPTIMIZER, checkpoint.WORKERS])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """A checkpoint that lacks one of its files is `corrupt_state`, by the file's name."""
    _write(tmp_path / "ckpt")
    (tmp_path / "ckpt" / name).unlink()

    with pytest.raises(CorruptState, match=rf"{name}' is missing"):
        checkpoint.read(tmp_path / "ckpt")


@pytest.mark.parametrize("version", [-1, 1 << 60, 1.5, "3", None, True])
def test_a_version_that_cannot_be_is_corrupt(tmp_path: Path, version: Any) -> None:
    """A version that is negative, too large or not an integer is `corrupt_state`."""
    _write(tmp_path / "ckpt")
    _change(tmp_path / "ckpt" / checkpoint.MANIFEST, versions=[version])

    with refused_with("corrupt_state", match="damaged.*version"):
        checkpoint.read(tmp_path / "ckpt")


@pytest.mark.parametrize("steps", [{}, {"half": 7}, *({"half": v} for v in (-1, 1 << 60, 1.5, "3", None, True, [7]))])
def test_step_counts_that_cannot_be_are_corrupt(tmp_path: Path, steps: dict[str, Any]) -> None:
    """Step counts that are missing, negative, too large or not integers are `corrupt_state`."""
    _write(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / checkpoint.MANIFEST
    counts = steps if steps in ({}, {"half": 7}) else json.loads(file.read_text())["steps"] | steps
    _change(file, steps=counts)

    with pytest.raises(PsError, match="damaged") as caught:
        checkpoint.read(tmp_path / "ckpt")
    assert caught.value.code == "corrupt_state"


def test_no_flipped_bit_of_a_manifest_is_taken_for_true(tmp_path: Path) -> None:
    """With any bit of its manifest flipped, a checkpoint is `corrupt_state` or gives spec, steps and all as written.

    The digits of a learning rate, a version or a step count would otherwise be others, and nobody told.
    """
    _write(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / checkpoint.MANIFEST
    wrote = file.read_bytes()

    def held() -> str:
        got = checkpoint.read(tmp_path / "ckpt")
        return repr((got.spec.document(), got.steps, got.versions, {n: len(s) for n, s in got.slots.items()}))

    true = held()
    for at in range(len(wrote)):
        flipped = bytearray(wrote)
        flipped[at] ^= 1 << at % 5
        file.write_bytes(flipped)
        try:
            got = held()
        except CorruptState:
            continue
        assert got == true, f"byte {at} of the manifest flipped: {bytes(flipped[max(0, at - 20) : at + 20])!r}"


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on open files")
def test_a_read_that_the_os_refuses_is_not_damage(tmp_path: Path) -> None:
    """A checkpoint that the OS does not let be opened now is an OSError with a file name, not `corrupt_state`."""
    import resource

    _write(tmp_path / "ckpt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for read in (checkpoint.read_manifest, checkpoint.read):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(OSError, match="Too many open files") as e:
                read(tmp_path / "ckpt")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert Path(e.value.filename) == tmp_path / "ckpt" / checkpoint.MANIFEST


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "files": {}}'])
def test_a_bad_manifest_is_corrupt(tmp_path: Path, text: str) -> None:
    """An invalid or incomplete manifest is `corrupt_state`, not a KeyError."""
    _write(tmp_path / "ckpt")
    (tmp_path / "ckpt" / checkpoint.MANIFEST).write_text(text)

    with refused_with("corrupt_state"):
        checkpoint.read(tmp_path / "ckpt")


def test_a_missing_checkpoint_is_unknown(tmp_path: Path) -> None:
    """Reading a folder that does not exist raises `unknown_checkpoint`."""
    with refused_with("unknown_checkpoint"):
        checkpoint.read(tmp_path / "nothing")


def test_existing_folders_are_kept(tmp_path: Path) -> None:
    """An existing folder is replaced only with `overwrite`, and only if it is a checkpoint."""
    _write(tmp_path / "ckpt")
    (tmp_path / "mine").mkdir()

    with pytest.raises(PsError, match="exists already"):
        _write(tmp_path / "ckpt")
    with pytest.raises(PsError, match="exists already"):
        _write(tmp_path / "mine", overwrite=True)
    _write(tmp_path / "ckpt", overwrite=True)

    assert checkpoint.read(tmp_path / "ckpt").versions == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "mine"]


def _killed_while_replacing(path: Path) -> None:
    """Leave what a process leaves that is killed between the two renames of `checkpoint.write`."""
    path.rename(path.with_name(f".{path.name}.0123abcd.old"))


def test_a_checkpoint_is_found_after_its_replacement_was_interrupted(tmp_path: Path) -> None:
    """A process killed while it replaces a checkpoint leaves the previous one, which is read under its name."""
    for name in ("ckpt", "ckpt.2"):
        _write(tmp_path / name)
    _killed_while_replacing(tmp_path / "ckpt")
    _killed_while_replacing(tmp_path / "ckpt.2")

    assert checkpoint.read(tmp_path / "ckpt").versions == [3, 4]
    assert checkpoint.read_manifest(tmp_path / "ckpt")["clock"] == 9
    with pytest.raises(PsError, match="exists already"):
        _write(tmp_path / "ckpt")
    _write(tmp_path / "ckpt", overwrite=True)

    assert checkpoint.read(tmp_path / "ckpt").versions == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".ckpt.2.0123abcd.old", "ckpt"]


def test_a_replaced_checkpoint_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed when the new checkpoint is in its place, the one before it is never taken for it."""
    sync = checkpoint._sync

    def killed(path: Path) -> None:
        if path == tmp_path:
            raise KeyboardInterrupt
        sync(path)

    _write(tmp_path / "ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sync", killed)
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path / "ckpt", overwrite=True)
    assert checkpoint.read(tmp_path / "ckpt").versions == [3, 4]
    shutil.rmtree(tmp_path / "ckpt")

    with refused_with("unknown_checkpoint"):
        checkpoint.read(tmp_path / "ckpt")


def test_the_newest_of_two_interrupted_replacements_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left beside a checkpoint is older, so the next replacement puts it out of the way first."""
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return rename(path, target)

    _write(tmp_path / "ckpt")
    shutil.copytree(tmp_path / "ckpt", tmp_path / ".ckpt.00000000.old")
    _change(tmp_path / ".ckpt.00000000.old" / checkpoint.MANIFEST, clock=8)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path / "ckpt", overwrite=True)

    assert checkpoint.read_manifest(tmp_path / "ckpt")["clock"] == 9
    _write(tmp_path / "ckpt", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_is_left_of_an_interrupted_deletion_goes_with_the_next_one(tmp_path: Path) -> None:
    """A replaced checkpoint whose deletion was interrupted is deleted when the next one has taken its place."""
    _write(tmp_path / "ckpt")
    for name in ("ckpt", "ckpt.2"):
        shutil.copytree(tmp_path / "ckpt", tmp_path / f".{name}.0123abcd.gone")

    _write(tmp_path / "ckpt", overwrite=True)

    assert sorted(p.name for p in tmp_path.iterdir()) == [".ckpt.2.0123abcd.gone", "ckpt"]


def test_what_a_killed_write_has_left_goes_with_a_later_one(tmp_path: Path) -> None:
    """The hidden folder of a write that was killed is deleted by one on another day; others may still be written."""
    _write(tmp_path / "ckpt")
    for name in (".ckpt.01234567.part", ".ckpt.89abcdef.part", ".ckpt.2.01234567.part"):
        shutil.copytree(tmp_path / "ckpt", tmp_path / name)
    for path in (tmp_path / ".ckpt.01234567.part").iterdir():
        os.utime(path, (1e9, 1e9))
    for name in (".ckpt.01234567.part", ".ckpt.89abcdef.part"):
        os.utime(tmp_path / name, (1e9, 1e9))

    _write(tmp_path / "ckpt", overwrite=True)

    assert sorted(p.name for p in tmp_path.iterdir()) == [".ckpt.2.01234567.part", ".ckpt.89abcdef.part", "ckpt"]


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path) -> None:
    """What is written at a link replaces the folder where it leads, say on a larger disk, and is read through it."""
    disk, link = tmp_path / "disk", tmp_path / "ckpt"
    link.symlink_to(disk / "ckpt")
    for _ in range(2):
        _write(link, overwrite=True)
    _killed_while_replacing(disk / "ckpt")

    assert checkpoint.read(link).versions == [3, 4]
    _write(link, overwrite=True)
    assert link.is_symlink()
    assert sorted(p.name for p in (*tmp_path.iterdir(), *disk.iterdir())) == ["ckpt", "ckpt", "disk"]


def test_a_previous_checkpoint_that_could_not_be_deleted_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a replaced checkpoint is not read, and does not keep its name, once the new one is deleted."""
    _write(tmp_path / "ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        _write(tmp_path / "ckpt", overwrite=True)
    shutil.rmtree(tmp_path / "ckpt")

    with pytest.raises(PsError):
        checkpoint.read(tmp_path / "ckpt")
    _write(tmp_path / "ckpt")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """A failed write leaves neither the folder nor a temporary one."""
    spec = _spec()

    with pytest.raises(PsError, match="shape"):
        checkpoint.write(tmp_path / "ckpt", spec, {p.name: np.zeros(1) for p in spec.params}, {}, {}, [], {}, {})
    with pytest.raises(TypeError):
        checkpoint.write(tmp_path / "ckpt", spec, _params(spec), {}, {}, [], {"w": object()}, {})

    assert list(tmp_path.iterdir()) == []


def test_the_manifest_lists_checksums(tmp_path: Path) -> None:
    """The manifest is plain JSON with a format version, the lowest version, and a SHA-256 digest of each file."""
    _write(tmp_path / "ckpt")

    manifest = json.loads((tmp_path / "ckpt" / checkpoint.MANIFEST).read_text())

    assert manifest["format"] == 1
    assert all(len(f["sha256"]) == 64 for f in manifest["files"].values())
    assert manifest["version"] == 3


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
@pytest.mark.parametrize(("workers", "file"), [(0, checkpoint.PARAMS), (1000, "")])
def test_a_disk_that_refuses_is_an_os_error(tmp_path: Path, workers: int, file: str) -> None:
    """A write that the OS refuses raises OSError with errno and file name, and leaves nothing."""
    import resource

    target, bytes_max = tmp_path / "ckpt", 64 if file else 8192
    states = {f"w{i}": i for i in range(workers)}
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        with pytest.raises(OSError, match="too large") as e:
            checkpoint.write(target, _spec(), _params(_spec()), {}, {}, [], states, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (e.value.errno, e.value.strerror) == (errno.EFBIG, os.strerror(errno.EFBIG))
    assert Path(e.value.filename) == target / file
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """An error names the folder that was asked for, not the temporary one that comes before it."""
    target = tmp_path / ("n" * 250)
    with pytest.raises(OSError, match="too long") as e:
        _write(target)
    assert Path(e.value.filename) == target
