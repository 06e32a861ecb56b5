"""`python -m datasvc.trainer profile`: the command line. It is parsed before torch is imported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from datasvc.errors import ConfigError
from datasvc.planning.cluster import add_cluster_options, parse_clusters
from datasvc.trainer.fast_imports import fast_imports
from datasvc.trainer.launch.config_file import OneLineParser
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.options import parse_options

_COMPRESSIONS: Final = ("fp16", "quantized:int8", "quantized:int4", "quantized:onebit")


def main(arguments: Sequence[str], *, prog: str = "python -m datasvc.trainer profile") -> None:
    """Run `profile` with the arguments of a command line; rank 0 prints the result. Every rank must call this.

    Args:
        arguments: arguments of the command line.
        prog: name of the program in usage messages.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        HorovodInternalError: a rank died.
    """
    # `chosen` has the options of `profile`; all other arguments are options of the training.
    chosen, training_arguments = _make_parser(prog).parse_known_args(arguments)
    # A profile writes no checkpoints, but `TrainConfig` requires a name for them.
    options = parse_options(["--name", "profile", *training_arguments], prog=prog)
    if options.show_config:
        sys.stdout.write(f"{options.describe()}\n")
        return
    config = options.config()
    # All options are checked before the ranks connect and data are opened.
    _check_options(chosen, config)
    clusters = parse_clusters(chosen)
    with fast_imports():
        import datasvc.trainer as hvd
        from datasvc.loaders.profiling.step_times import trace_path, write_trace
        from datasvc.trainer.recipes import random_state
        from datasvc.trainer.recipes.profiling.profile_steps import profile_steps

    hvd.init()
    random_state.seed_all(config.seed)
    try:
        rank = hvd.rank()
        profile, spans = profile_steps(
            config,
            clusters,
            steps=chosen.steps,
            rounds=chosen.rounds,
            checks_modes=chosen.check,
            compressions=chosen.compressions,
        )
    finally:
        hvd.shutdown()
    if rank == 0:
        print(json.dumps(profile.to_dict()) if chosen.json else profile.describe(chosen.top), flush=True)
    # Every rank writes its trace after the result is printed. A full disk must not lose a result that took minutes.
    if chosen.trace is not None:
        path = trace_path(chosen.trace, rank=rank, num_ranks=profile.world_size)
        write_trace(path, spans, process_name=f"{profile.config.model}, rank {rank}")


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description="Measure what a training step costs, part by part, and predict it for other clusters. "
        "Takes the options of python -m datasvc.trainer as well, of which --data and --repo must be given.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of a timed block [%(default)s]")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed blocks; medians over them are printed [%(default)s]"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also run the step serial, prefetched and overlapped, and compare with the prediction",
    )
    parser.add_argument(
        "--compressions",
        nargs="*",
        metavar="COMPRESSION",
        help="also predict a step with these compressions of gradients on the links of this job [if none is named, "
        f"those that the other options allow of {', '.join(_COMPRESSIONS)}]",
    )
    parser.add_argument("--top", type=int, default=10, help="number of slowest layers to print [%(default)s]")
    add_cluster_options(parser, num_nodes=(), default_help="none: nothing is predicted")
    parser.add_argument("--trace", metavar="FILE", help="write a step as a Chrome trace, one file per rank")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check_options(chosen: argparse.Namespace, config: TrainConfig) -> None:
    if config.profile is not None:
        raise ConfigError("--profile is an option of training runs; use --trace FILE to write a trace of one step")
    if config.averages_weights:
        raise ConfigError(f"sync is {config.sync}; a profile measures all-reduces of gradients: give --sync bsp")
    chosen.compressions = _choose_compressions(chosen.compressions, config)
    for name in ("steps", "rounds", "top"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"{name} is {getattr(chosen, name)}; expected at least 1")
    if chosen.trace is not None and not Path(chosen.trace).absolute().parent.is_dir():
        raise ConfigError(f"trace is {chosen.trace!r}, and its folder does not exist; create the folder first")


def _choose_compressions(named: Sequence[str] | None, config: TrainConfig) -> list[str]:
    """Return the compressions to measure: those that are named, or the usual ones that the settings allow.

    Raises:
        ConfigError: the settings exclude one that is named.
    """
    if named is None:
        return []
    chosen = []
    for compression in named or _COMPRESSIONS:
        try:
            dataclasses.replace(config, compression=compression)  # raises if the other settings exclude it
        except ConfigError as error:
            if named:
                raise ConfigError(f"--compressions {compression}: {error}") from error
        else:
            chosen.append(compression)
    return chosen
