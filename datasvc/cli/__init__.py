"""The command line, one module per group of commands. A command parses, calls one function and prints the result."""

import os

# Set before Arrow is imported. Arrow's own pools keep freed memory: with the system's, ingest workers are a fifth
# smaller.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
