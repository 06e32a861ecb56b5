"""``python -m trainer.launch``."""

import sys

from trainer.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
