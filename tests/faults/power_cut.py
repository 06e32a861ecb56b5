"""What a power cut does to files: bytes and names that were not synced may be gone. See power_cut.c for the log."""

import os
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def cut_power(root, log, random):
    """Undo a part of what was not synced below `root`, by the log of the processes that have been killed.

    Returns the numbers of files that lost bytes and of names that are gone. The log is emptied: what is left is on
    the disk from now on.
    """
    written, synced = {}, {}  # number of the last line, by inode
    named = defaultdict(list)  # by path: its folder's inode and the number of the line, for each time it was made
    for number, line in enumerate(Path(log).read_text(errors="surrogateescape").splitlines()):
        kind, inode, *path = line.split(" ", 2)
        if kind == "n":
            named[path[0]].append((int(inode), number))
        elif kind == "x":
            named[path[0]].pop()
        else:
            (written if kind == "w" else synced)[int(inode)] = number
    lost_names = 0
    for path, (folder, number) in [(path, times[-1]) for path, times in named.items() if times]:
        if number > synced.get(folder, -1) and os.path.lexists(path) and random.random() < 0.5:
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            lost_names += 1
    lost_bytes = 0
    for path in Path(root).rglob("*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            is_unsynced = written.get(found.st_ino, -1) > synced.get(found.st_ino, -1)
            if path.is_file() and is_unsynced and random.random() < 0.8:
                path.chmod(0o600)
                os.truncate(path, random.choice([0, found.st_size // 2]))
                lost_bytes += 1
    Path(log).write_bytes(b"")
    return lost_bytes, lost_names
