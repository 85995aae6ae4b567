"""This user's own folders where every user can make some, such as in /tmp and /dev/shm."""

import os
import stat
from pathlib import Path


def make_own(folder: Path) -> None:
    """Create the folder, for this user only, unless it is there.  Raises OSError if it is not this user's own."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # not `stat`: another user's link could lead to any folder of this user
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} is not this user's own folder")
