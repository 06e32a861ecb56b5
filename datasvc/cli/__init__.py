"""The command line: one file per group. A command parses, calls one function, prints its value."""

import os

# Before anything loads Arrow, whose own pools keep what is freed: a worker of an ingest is a fifth smaller so.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
