"""Run the training program on this rank: `python -m datasvc.trainer --data digits@1 --repo URL --name digits-cnn`.

Several ranks: `python -m datasvc.trainer.launch -np 2 python -m datasvc.trainer ...`, or torchrun.
`python -m datasvc.trainer profile ...` measures the parts of a step instead.
"""

from __future__ import annotations

import sys

from datasvc.errors import DatasvcError
from datasvc.trainer import HorovodInternalError
from datasvc.trainer.recipes.settings.options import parse_options


def main() -> None:
    """Run the recipe; an error that a user can cause ends without a traceback."""
    try:
        if sys.argv[1:2] == ["profile"]:
            from datasvc.trainer.recipes.profiling.command import main as profile

            profile(sys.argv[2:])
            return
        options = parse_options()
        config = None if options.missing else options.config()
        if options.show_config:
            sys.stdout.write(f"{options.describe()}\n")
            return
        assert config is not None
        from datasvc.trainer.recipes.train import train

        train(config)
    except DatasvcError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except HorovodInternalError as error:
        # Of a rank that died its own error says why: tracebacks of all that are left would bury it. By the name the
        # launcher knows who ended because of another.
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
