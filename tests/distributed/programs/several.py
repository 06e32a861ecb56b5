"""Runs other programs of this folder in turn, after one start of the ranks. Arguments: NAME or NAME:ARGUMENT."""

import runpy
import sys
from pathlib import Path

for text in sys.argv[1:]:
    name, _, argument = text.partition(":")
    sys.argv = [name, argument]
    runpy.run_path(str(Path(__file__).with_name(name)))
