"""The command line `datasvc`, one module per group of commands.

A command parses its arguments, calls one function of the library and prints the result. Commands import Arrow, torch
and the repository inside their functions, so that `--help` is fast.
"""

import os

# Set this before Arrow is imported. Arrow's own pools keep freed memory; with the system's pool, ingest workers need
# a fifth less memory.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
