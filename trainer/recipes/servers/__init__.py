"""The training program with parameter servers: `datasvc-run --servers`, `--sync ssp:STEPS` and `--sync async`."""
