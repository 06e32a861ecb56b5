"""Run the training program on this rank: `python -m datasvc.trainer --data digits@1 --repo URL --name digits-cnn`.

For several ranks, use `python -m datasvc.trainer.launch -np 2 python -m datasvc.trainer ...`, or torchrun.
`python -m datasvc.trainer profile ...` measures the parts of a step instead.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from datasvc.errors import DatasvcError
from datasvc.printable import escape_unencodable
from datasvc.trainer import HorovodInternalError
from datasvc.trainer.fast_imports import fast_imports


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m datasvc.trainer") -> None:
    """Run the training program; exit without a traceback after an error that a user can cause.

    Args:
        arguments: command-line arguments; None for those of this process.
        prog: name of the program in usage messages.
    """
    escape_unencodable()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # Modules are imported here, so that an interrupt of an import ends in one line too.
        from datasvc.trainer.recipes.settings.options import parse_options

        if arguments[:1] == ["profile"]:
            from datasvc.trainer.recipes.profiling.command import main as profile

            profile(arguments[1:], prog=f"{prog} profile")
            return
        options = parse_options(arguments, prog=prog)
        # Only `--show-config` permits missing options. Options that are complete are validated for it too.
        config = None if options.missing else options.config()
        if options.show_config:
            sys.stdout.write(f"{options.describe()}\n")
            return
        assert config is not None, "`parse_options` refuses missing options without `--show-config`"
        with fast_imports():
            from datasvc.trainer.recipes.servers.job import train_any

        train_any(config)
    except DatasvcError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except HorovodInternalError as error:
        # The error of the rank that failed states the cause; tracebacks of all other ranks would hide it. The
        # class name tells the launcher that this rank exited only because another rank had failed.
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        # This Ctrl-C came before the run could save, or was the second: the first one during the training saves, and
        # ends the run. A launcher interrupts all ranks, but one message is enough.
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("error: interrupted by Ctrl-C; steps since the last checkpoint are lost\n")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
