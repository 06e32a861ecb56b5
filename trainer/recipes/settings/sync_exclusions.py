"""The settings that `--sync` excludes, unless it is "bsp". This table is the only place that states them.

docs/explanation/waiting.md shows it. The check runs when the settings are created, before the ranks connect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.planning.layout import parse_sizes
from datasvc.trainer.optim.sync_policy import SyncPolicy, parse_sync


@dataclass(frozen=True)
class Exclusion:
    """A setting that does not go with an average of weights, or with parameter servers.

    Attributes:
        option: the setting, as on a command line.
        is_set: whether settings, a `TrainConfig`, have it.
        reason: why it is excluded; a clause about "it".
        remedy: what to do instead.
    """

    option: str
    is_set: Callable[[Any], bool]
    reason: str
    remedy: str


def _lacks_replicas(sizes: Mapping[str, int]) -> bool:
    return sizes.get("replica", 1) == 1 and bool(sizes.keys() - {"data"})


def _divides(config: Any, axis: str) -> bool:
    return config.layout is not None and parse_sizes(config.layout).get(axis, 1) > 1


def _is_elastic(policy: SyncPolicy) -> bool:
    return policy.gives_equal_weights and policy.kind != "hierarchical"


def _has_plain_rounds(policy: SyncPolicy) -> bool:
    return _is_elastic(policy) and policy.delay == 0


EXCLUSIONS: Final = (
    Exclusion(
        "--layout with other axes than data, without replicas",
        lambda config: config.layout is not None and _lacks_replicas(parse_sizes(config.layout)),
        "there is no other replica of the model to average with",
        "add the number of replicas to the layout, such as replica=2",
    ),
    Exclusion(
        "--layout with other axes than data, in a tournament",
        lambda config: (
            config.layout is not None
            and bool(parse_sizes(config.layout).keys() - {"data"})
            and parse_sync(config.sync).kind == "tournament"
        ),
        "a loser takes over a whole model from one rank",
        "leave out --layout",
    ),
    Exclusion(
        "--statistics recompute, in a tournament",
        lambda config: config.recomputes_statistics and parse_sync(config.sync).kind == "tournament",
        "each replica has the statistics of its own weights, by which it is judged",
        "leave it out: a version has the winner's",
    ),
    Exclusion(
        "--layout with pipeline",
        lambda config: _divides(config, "pipeline"),
        "the first and the last stage can have the same weights, whose sums would be rounded apart",
        "use tensor, shard or context",
    ),
    Exclusion(
        "--layout with tensor, if DiLoCo has a codec",
        lambda config: _divides(config, "tensor") and parse_sync(config.sync).codec is not None,
        "ranks of a replica that have the same weights would round them in blocks with others",
        "leave out codec, or use shard or context",
    ),
    Exclusion(
        "--zero 1",
        lambda config: config.zero == 1,
        "its optimizer sums the gradients of all ranks",
        "use --zero 2 or 3",
    ),
    Exclusion(
        "--elastic with hierarchical, easgd, gossip, tournament, fragments or alpha",
        lambda config: config.elastic and not _is_elastic(parse_sync(config.sync)),
        "after the loss of a rank the others continue from a round that gave all the same weights, and the rounds of "
        "`hierarchical` need nodes of equal sizes",
        "use local, postlocal or diloco without fragments and alpha",
    ),
    Exclusion(
        "--leases with hierarchical, easgd, gossip, tournament, fragments, delay or alpha",
        lambda config: config.leases is not None and not _has_plain_rounds(parse_sync(config.sync)),
        "its rounds end when each replica has made its own number of steps, and all get the same weights then",
        "use local, postlocal or diloco without fragments, delay and alpha",
    ),
    Exclusion(
        "--leases with --skip",
        lambda config: config.leases is not None and config.skip is not None,
        "which samples a step has follows from the speeds of the rounds before it",
        "mask samples by their keys, with datasvc forget",
    ),
    Exclusion(
        "--leases with --decode-group",
        lambda config: config.leases is not None and config.decode_group is not None,
        "the jobs of a group have the same batches, and leases follow the speed of one job",
        "leave out one of both",
    ),
    Exclusion(
        "--leases with --tune-loader",
        lambda config: config.leases is not None and config.tune_loader,
        "the share of a rank follows the speed of its rounds before, which a trial changes",
        "leave out one of both",
    ),
    Exclusion(
        "--op adasum",
        lambda config: config.combines_steps,
        "it combines the steps of the ranks in every step",
        "leave out --op",
    ),
    Exclusion(
        "--compression",
        lambda config: config.compression != "none",
        "it compresses gradients, and the ranks send weights",
        "leave it out; more steps in a round save more bytes",
    ),
    Exclusion(
        "--bucket",
        lambda config: config.bucket is not None,
        "no gradients are sent",
        "leave it out",
    ),
    Exclusion(
        "--sync-batch-norm",
        lambda config: config.sync_batch_norm,
        "it exchanges statistics in every step, of ranks with different weights",
        "leave it out, or give --statistics recompute for exact statistics of the averaged weights",
    ),
    Exclusion(
        "--ema-decay",
        lambda config: config.ema_decay is not None,
        "each rank would average other weights",
        "leave it out",
    ),
    Exclusion(
        "--precision fp16",
        lambda config: config.precision == "fp16",
        "a rank whose gradients overflow skips its step alone, and would miss the round",
        "use bf16, which needs no loss scale",
    ),
)

SERVER_EXCLUSIONS: Final = (
    Exclusion(
        "--layout",
        lambda config: config.layout is not None,
        "each worker has the whole model, and the servers divide it by their own rule",
        "leave it out",
    ),
    Exclusion(
        "--elastic",
        lambda config: config.elastic,
        "the job goes on without workers that are lost anyway",
        "leave it out",
    ),
    Exclusion(
        "--op adasum",
        lambda config: config.combines_steps,
        "workers make no steps",
        "leave out --op",
    ),
    Exclusion(
        "--compression",
        lambda config: config.compression != "none",
        "gradients are sent in float32",
        "leave it out",
    ),
    Exclusion(
        "--bucket",
        lambda config: config.bucket is not None,
        "a gradient is sent in one piece to each server",
        "leave it out",
    ),
    Exclusion(
        "--clip-norm",
        lambda config: config.clip_norm is not None,
        "no process has the gradient of a whole step, whose norm it would be",
        "leave it out",
    ),
    Exclusion(
        "--sync-batch-norm",
        lambda config: config.sync_batch_norm,
        "workers are not at the same step",
        "give --statistics recompute",
    ),
    Exclusion(
        "--ema-decay",
        lambda config: config.ema_decay is not None,
        "the servers have no average of their weights",
        "leave it out",
    ),
    Exclusion(
        "--precision fp16",
        lambda config: config.precision == "fp16",
        "a loss scale would differ between workers",
        "use bf16, which needs none",
    ),
    Exclusion(
        "--signals",
        lambda config: config.signals is not None,
        "a worker may be lost with the losses that it has recorded",
        "leave it out",
    ),
    Exclusion(
        "--profile",
        lambda config: config.profile is not None,
        "server 0, which reports, loads no batches",
        "leave it out",
    ),
    Exclusion(
        "--decode-group",
        lambda config: config.decode_group is not None,
        "workers read other samples in each run",
        "leave it out",
    ),
    Exclusion(
        "--tune-loader",
        lambda config: config.tune_loader,
        "a worker prefetches nothing, since the servers choose its next part",
        "leave it out",
    ),
    Exclusion(
        "--peers ranks",
        lambda config: config.peers == "ranks",
        "a worker that serves other nodes may be lost",
        "give the addresses of `datasvc serve`",
    ),
    Exclusion(
        "--local-checkpoints",
        lambda config: config.local_checkpoints is not None,
        "only server 0 saves",
        "leave it out",
    ),
)


def check_exclusions(config: Any) -> None:
    """Refuse settings, a `TrainConfig`, that do not go with its setting `sync`. Raises ConfigError: one is set."""
    exclusions = EXCLUSIONS if config.averages_weights else SERVER_EXCLUSIONS if config.uses_servers else ()
    for excluded in exclusions:
        if excluded.is_set(config):
            raise ConfigError(
                f"sync is {config.sync!r}, which does not go with {excluded.option}: {excluded.reason}; "
                f"{excluded.remedy}, or give --sync bsp"
            )


def format_exclusions() -> str:
    """Return the tables as Markdown, as the documentation has them."""
    tables = {"not with `--sync`": EXCLUSIONS, "not with `ssp` and `async`": SERVER_EXCLUSIONS}
    return "\n".join(_format_table(title, exclusions) for title, exclusions in tables.items())


def _format_table(title: str, exclusions: tuple[Exclusion, ...]) -> str:
    rows = (f"| `{each.option}` | {each.reason} | {each.remedy} |\n" for each in exclusions)
    return f"| {title} | because | instead |\n|---|---|---|\n" + "".join(rows)
