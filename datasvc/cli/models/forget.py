"""`datasvc forget`: train a model again, without given samples, from its last version before the first of them."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any

import typer

from datasvc.cli.datasets.ingest import chosen_keys
from datasvc.cli.models.arguments import RefArgument
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    DryRunOption,
    JsonOption,
    KeysOption,
    RepoOption,
    SampleOption,
    check_one_of,
    print_json,
    print_line,
)
from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.repository.logs.references import parse_reference


@options_from("models.provenance.forgetting.plan_forget", data=typer.Option(metavar="DATA"))
def forget(
    ref: RefArgument,
    repo: RepoOption,
    sample: SampleOption = None,
    keys: KeysOption = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Train. Without --yes, only print what it costs.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Train a model again without given samples, from its last version before the first of them.

    Example: datasvc forget digits-cnn --keys withdrawn.txt --repo ./repo

    At the same ranks and batch sizes, the weights are, to the last bit, those of a run that had masked the samples
    from its beginning. The cost in optimizer steps is printed first. Several ranks: datasvc-run -np 4 datasvc forget
    ... --yes. A program of your own takes the samples to mask from `repo.models.plan_forget`.
    """
    import datasvc

    check_one_of(yes=yes, dry_run=dry_run)
    if sample is None and keys is None:
        raise ConfigError("give the samples with --sample KEY or --keys FILE")
    is_elastic, reference = "TRAINER_ELASTIC_WORKER" in os.environ, parse_reference(ref, "model")
    if yes and is_elastic and reference.version is None:
        raise ConfigError(
            f"{ref} is another version as soon as this job has saved one, and a rank that joins later must forget "
            f"from the same version: in an elastic job, give it, such as {reference.name}@9"
        )
    opened = datasvc.open(repo)
    sample_keys = chosen_keys(sample, keys)
    plan = opened.models.plan_forget(ref, sample_keys, **options)
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            print_json(plan.to_json())
        else:
            _print(plan)
    if yes and plan.num_samples:
        from datasvc.trainer.recipes.masking import configs_of_plan
        from datasvc.trainer.recipes.train import train

        version, configs = plan.start, configs_of_plan(opened, plan)
        if is_elastic and len(configs) > 1:
            raise ConfigError(
                f"the batch size of {plan.model} changed during the steps to take again: start this job without "
                "--min-num-proc and the other options of elastic jobs"
            )
        for config in configs:
            version = train(replace(config, resume=version or "never"), plan)


def _ranks_of(part: Any) -> tuple[int | None, int | None]:
    return part.global_batch, part.ranks


def _print(plan: Any) -> None:
    if not plan.num_samples:
        print_line(f"{plan.model} was not trained on these samples: there is nothing to forget")
        return
    first = "at an unknown step" if plan.first_step is None else f"first at step {plan.first_step}"
    print_line(f"{plan.model} was trained on {count_text(plan.num_samples, 'of these samples')}, {first}")
    start = f"{plan.start}, of step {plan.start_step}" if plan.start is not None else "the beginning"
    print_line(
        f"to forget them, train again from {start}, to step {plan.stop_step}: {count_text(plan.num_steps, 'step')}"
    )
    # Leases change within a run. They are repeated as they were, and are no news.
    repeated = [last for _, parts in groupby(plan.repeated, _ranks_of) for *_, last in [list(parts)]]
    if len(repeated) > 1:
        parts = (
            f"to step {part.stop_step} with {count_text(part.ranks, 'rank') if part.ranks else 'unknown ranks'} and "
            f"batches of {part.global_batch or 'unknown size'}"
            for part in repeated
        )
        print_line(f"the run took them {', '.join(parts)}; the last bits depend on the ranks")
    if plan.removed:
        print_line(f"{', '.join(plan.removed)} would have saved steps, but was removed: keep more versions (retain)")
