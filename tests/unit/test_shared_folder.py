"""The folder of a shard's shared memory: who may have it, what it counts, and what killed processes left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paramserver_shard.shared_folder import SharedFolder, sweep

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="buffers are mapped in place on Linux")


@pytest.mark.parametrize("root", ["", "/nonexistent/folder"])
def test_no_folder_where_there_can_be_none(root: str) -> None:
    """There is no shared folder if it is turned off or its root does not exist."""
    assert SharedFolder.open(root, "shard-0", 1 << 20) is None


def test_a_folder_that_could_not_be_opened_is_not_locked(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If opening it fails after its lock is taken, the lock is released and the next sweep removes the folder."""

    def fail(_: Path) -> None:
        raise OSError("no such call")

    with monkeypatch.context() as failing:
        failing.setattr("os.statvfs", fail)
        assert SharedFolder.open(str(short_path), "shard-1", 1 << 20) is None
    (parent,) = short_path.iterdir()
    sweep(parent)
    assert not list(parent.iterdir())


def test_a_link_in_the_place_of_the_folder_is_not_followed(short_path: Path) -> None:
    """Where others can write, a link to a folder of the user's must not have that folder swept."""
    (precious := short_path / "home" / "work").mkdir(parents=True)
    os.utime(precious, (0.0, 0.0))
    (root := short_path / "shm").mkdir()
    (root / f"paramserver-{os.getuid()}").symlink_to(short_path / "home")

    assert SharedFolder.open(str(root), "shard-0", 1 << 20) is None
    assert precious.exists()


def test_what_a_killed_shard_left_is_removed_by_the_next(short_path: Path, folder: SharedFolder) -> None:
    """A sweep removes the folder of a process killed by SIGKILL, and keeps those of live processes."""
    code = (
        "import sys, time; from paramserver_shard.shared_folder import SharedFolder;"
        f"f = SharedFolder.open({str(short_path)!r}, 'shard-1', 1 << 20); f.allocate(65536);"
        "print(f.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        sweep(path.parent)
        assert path.exists()
        process.send_signal(signal.SIGKILL)
    sweep(path.parent)
    assert not path.exists()
    assert folder.path.exists()


@pytest.mark.parametrize("name", ["shard-1-a", ".shard-1-a"])
def test_a_folder_that_was_half_removed_is_removed_by_the_next(short_path: Path, name: str) -> None:
    """A sweep removes a folder without a lock, under either name, once it is too old to be in creation."""
    (path := short_path / name).mkdir()
    (path / "b1").write_bytes(b"values")
    sweep(short_path)
    assert path.exists()
    os.utime(path, (0.0, 0.0))
    sweep(short_path)
    assert not path.exists()


def test_what_is_no_shards_folder_does_not_stop_a_sweep(short_path: Path) -> None:
    """A file among the folders stays, and those of ended processes are removed; a shard there had no shared memory."""
    folder = SharedFolder.open(str(short_path), "shard-1", 1 << 20)
    assert folder is not None
    parent = folder.path.parent
    (parent / "a file").touch()
    (left := parent / "shard-0-a").mkdir()
    os.utime(left, (0.0, 0.0))
    sweep(parent)
    assert (parent / "a file").exists()
    assert folder.path.exists()
    assert not left.exists()
    folder.close()


def test_a_folder_that_is_being_removed_is_never_taken_for_one_in_use(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is renamed to a name that no shard has before it is removed, in case the removal is interrupted."""
    folder = SharedFolder.open(str(short_path), "shard-1", 1 << 20)
    assert folder is not None
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    folder.close()
    (left,) = folder.path.parent.iterdir()
    assert left.name.startswith(".")


def test_a_folder_is_its_users_alone(folder: SharedFolder) -> None:
    """The shared folder gives no access to group and others."""
    assert os.stat(folder.path).st_mode & 0o077 == 0
    assert time.time() - os.stat(folder.path / "lock").st_mtime < 60
