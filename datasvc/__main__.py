"""`python -m datasvc` is the command line, also where the folder of the script `datasvc` is not on the PATH."""

from __future__ import annotations

from datasvc.cli.main import main

if __name__ == "__main__":
    main()
