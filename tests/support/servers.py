"""Whether tests use the real servers and networks of this machine, or always their replacements."""

import os

VARIABLE = "DATASVC_TEST_SERVERS"
REPLACED = f"{VARIABLE}=replaced"


def are_replaced():
    """Return whether the environment asks for what a bare machine has: moto for S3, loopback addresses for nodes."""
    value = os.environ.get(VARIABLE, "real")
    assert value in {"real", "replaced"}, f"{VARIABLE} is {value!r}; expected 'real' or 'replaced'"
    return value == "replaced"
