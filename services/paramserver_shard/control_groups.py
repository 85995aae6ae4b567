"""The control groups of Linux around this process, which limit its memory and processors."""

from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> list[Path]:
    """Return the folders of this process's group and its ancestors, for version 1 of that controller and version 2.

    Not all of them exist; on systems other than Linux none does.
    """
    found = [root, root / controller]  # inside a container, its own group is the root
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                folder = root / controller if controllers else root
                for name in path.split("/"):
                    if name not in ("", ".."):
                        folder /= name
                        found.append(folder)
    except (OSError, ValueError):
        pass  # not Linux, or no control groups
    return found


def numbers(folder: Path, *files: str) -> list[int]:
    """Return the numbers in these files of a folder; none if a file does not exist, or has the word for no limit."""
    try:
        return [int(word) for file in files for word in (folder / file).read_text().split()]
    except (OSError, ValueError):
        return []
