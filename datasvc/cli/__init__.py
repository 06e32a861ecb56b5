"""The command line: one file per group. A command parses, calls one function, prints its value."""
