"""A job of a decode group that says that it decodes some steps, and does no more until its input ends.

    python claimer.py GROUP SETTINGS FORKS POSITION...

With FORKS = 1 it has a forked child that outlives it and waits for the end of the input too.
"""

import json
import os
import sys

from datasvc.loaders.core.batches import Cursor
from datasvc.loaders.decode_sharing.group_folder import GroupFolder
from datasvc.loaders.ranks.data_ranks import DataRanks


def main():
    name, settings, forks, *positions = sys.argv[1:]
    folder = GroupFolder(name, DataRanks(), json.loads(settings))
    folder.join()
    for position in positions:
        assert folder.find_or_claim(Cursor(0, int(position))) is None
    if forks == "1" and os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    os.write(1, b"claimed\n")
    os.read(0, 1)


if __name__ == "__main__":
    main()
