"""What caches take of the disk, seen from outside while they change; and disks small enough to be filled."""

import os
import subprocess
import threading
from pathlib import Path

_FOLDERS = ("objects", "incoming", "quarantine")
_BLOCK = 512


def files_of(cache):
    """Return bytes on the disk by inode of what counts against a cache's budget."""
    found = {}
    for name in _FOLDERS:
        for folder, _, names in os.walk(cache / name):
            for each in names:
                try:
                    status = os.stat(f"{folder}/{each}")
                except FileNotFoundError:
                    continue
                if not each.endswith(".parts"):
                    found[status.st_ino] = status.st_blocks * _BLOCK
    return found


def certain_bytes(cache):
    """Return bytes that a cache took at one instant, at least: of what lay there before it and lies there after it.

    One walk would count what is evicted behind it together with what is fetched into its room.
    """
    before, after = files_of(cache), files_of(cache)
    return sum(min(size, after[inode]) for inode, size in before.items() if inode in after)


class BudgetWatcher:
    """Looks at caches again and again, from `__enter__` to `__exit__`.

    Args:
        budgets: bytes by folder of the cache.
    """

    def __init__(self, budgets):
        self._budgets = budgets
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.num_looks = 0
        self.most_bytes = dict.fromkeys(budgets, 0)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._ending.set()
        self._thread.join()

    @property
    def over(self):
        """Folders that were over their budget, and by how much."""
        return {
            folder: most - self._budgets[folder]
            for folder, most in self.most_bytes.items()
            if most > self._budgets[folder]
        }

    def _watch(self):
        while not self._ending.wait(0.02):
            for folder in self._budgets:
                self.most_bytes[folder] = max(self.most_bytes[folder], certain_bytes(folder))
            self.num_looks += 1


class SmallDisk:
    """A file system of its own in memory, mounted from `__enter__` to `__exit__` where this machine allows that.

    Args:
        folder: where; made.
        size_bytes: of it.
    """

    def __init__(self, folder, size_bytes):
        folder.mkdir()
        self._folder = folder
        self._filling = folder / "filling"
        self._size_bytes = size_bytes
        self.is_mounted = False

    def __enter__(self):
        words = ["mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs", self._folder]
        self.is_mounted = subprocess.run(words, check=False, capture_output=True).returncode == 0
        return self

    def __exit__(self, *_error):
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self._folder], check=True)

    def fill(self, left_bytes):
        """Take all the room but `left_bytes`."""
        status = os.statvfs(self._folder)
        wanted = status.f_bavail * status.f_frsize - left_bytes
        if wanted > 0:
            with open(self._filling, "wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, wanted)
                except OSError:  # somebody else was faster: it is full all the same
                    return

    def empty(self):
        """Give the room back."""
        Path(self._filling).unlink(missing_ok=True)
