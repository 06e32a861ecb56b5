"""`datasvc replay | bisect`: the exact batch of any step of a run, and its sample that made a metric jump."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import (
    DryRunOption,
    JsonOption,
    RepoOption,
    print_facts,
    print_json,
    print_line,
    print_table,
)
from datasvc.errors import ConfigError
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.api import DataRepository
    from datasvc.replay.bisect import BisectPlan, MaskedRun
    from datasvc.trainer.recipes.settings.config import TrainConfig


def replay(
    step_of_run: Annotated[
        str,
        typer.Argument(metavar="RUN@STEP", help="A run and a step; or MODEL@VERSION, with --step."),
    ],
    repo: RepoOption,
    step: Annotated[int | None, typer.Option(min=1, help="The step, for MODEL@VERSION.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the part of this data rank.")] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the batch as files to a new folder.")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a contact sheet to this HTML file.")
    ] = None,
    transform: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="The transform of the images, if the run had one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the exact batch that a step of a run was trained on, from the entry of a version alone.

    Example: datasvc replay digits-cnn@1205 --sheet batch.html --repo ./repo

    Files and contact sheet have pixels or tokens as the training got them, augmented. A step after the last version
    of a run is taken as the run would have continued it.
    """
    from datasvc.replay.batch_at import batch_at
    from datasvc.repository import Repository
    from datasvc.shards.query.contact_sheet import write_contact_sheet
    from datasvc.views.replayed import previews, replay_facts, write_replay

    function = None
    if transform is not None:
        from datasvc.trainer.recipes.models.registry import import_function

        function = import_function(transform, what="transform")
    found = batch_at(Repository.open(repo), step_of_run, step, rank=rank, transform=function)
    if to is not None:
        write_replay(found, to)
    if sheet is not None:
        write_contact_sheet(
            sheet, f"Step {found.step.step} of {found.step.run or found.step.version}", previews(found)
        )
    if as_json:
        print_json(found.to_json())
        return
    print_facts(replay_facts(found))
    marks = [
        "yes" if masked else "purged" if purged else ""
        for masked, purged in zip(found.is_masked, found.is_purged, strict=True)
    ]
    rows = zip(found.positions.tolist(), found.keys, found.sources, marks, strict=True)
    print_table(["position", "key", "data", "masked"], list(rows))


def bisect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="NAME/ID, or NAME for the newest run of this name.")],
    step: Annotated[int, typer.Option("--from", metavar="STEP", min=1, help="The step whose metric jumped.")],
    repo: RepoOption,
    metric: Annotated[str, typer.Option(help="A metric of the steps in the log of the run.")] = "loss",
    dry_run: DryRunOption = False,
) -> None:
    """Name the sample that made a metric jump, by short runs that each mask a half of the samples in question.

    Example: datasvc bisect digits-cnn --from 1205 --repo ./repo

    Each run continues the last version before the step with the training program, in one process, up to the step. A
    batch of n samples needs ceil(log2 n) runs. Their versions, NAME-bisect, are removed at the end.
    """
    import datasvc
    from datasvc.models.registry.retention import remove
    from datasvc.replay.bisect import find_sample, plan_bisect

    opened = datasvc.open(repo)
    plan = plan_bisect(opened.repository, run, step, metric)
    config = _config_of_runs(opened, plan)
    batch, start = plan.batch, plan.start or "the beginning"
    print_line(
        f"{metric} of step {step} is {plan.spike:g}, and {plan.usual:g} before it; "
        f"{count_text(len(batch.keys), 'sample')}, so up to {count_text(plan.num_runs, 'run')} from {start}"
    )
    if dry_run:
        return
    runs: list[MaskedRun] = []

    def report(ended: MaskedRun) -> None:
        runs.append(ended)
        state = "as before the step" if ended.is_usual else "as in the step"
        print_line(f"without samples {ended.masked[0]} to {ended.masked[1]}: {ended.value:g}, {state}")

    earlier = set(opened.repository.living("models", config.name))
    try:
        index = find_sample(plan, lambda masked: _run_masked(plan, config, masked), report)
    finally:
        saved = [f"{config.name}@{each}" for each in opened.repository.living("models", config.name)]
        if new := [version for version in saved if int(version.partition("@")[2]) not in earlier]:
            remove(opened.repository, new)
    if runs and not any(each.is_usual for each in runs):
        print_line("no run was as before the step, so the cause may be another one: check with this --skip")
    print_line(
        f"{batch.keys[index]} of {batch.sources[index]} made the jump, after {count_text(len(runs), 'run')}; "
        f"--skip {step}:{index} leaves it out of the training"
    )


def _config_of_runs(repo: DataRepository, plan: BisectPlan) -> TrainConfig:
    """Return the settings of the short runs, without samples to mask."""
    from datasvc.ledger.skipped_steps import up_to
    from datasvc.trainer.recipes.masking import config_of_version
    from datasvc.trainer.recipes.settings.config import LayoutSettings, setting_fields

    step = plan.batch.step
    advice = (
        f"up to step {step.step}, with `masked=Masked(((epoch, start, stop),))` for its loader; "
        "datasvc.replay.bisect.find_sample searches with a function that does so (docs/how-to/find-the-batch.md)"
    )
    config = config_of_version(repo, step.version, plan.start, advice=advice)
    # A short run has one rank, and writes no ledger, metrics, profile or log.
    left_out = {field.name for field in dataclasses.fields(LayoutSettings)}
    left_out |= {"ledger", "elastic", "local_checkpoints", "every_local", "metrics_port", "peers", "decode_group"}
    left_out |= {"profile", "signals", "log_to", "sync", "leases"}
    defaults: dict[str, Any] = {field.name: field.default for field in setting_fields() if field.name in left_out}
    return dataclasses.replace(
        config,
        **defaults,
        name=f"{config.name}-bisect",
        # The state of a version has what its run skipped before.
        skip=None if plan.start or config.skip is None else up_to(config.skip, step.step) or None,
        max_steps=step.step,
        global_batch=step.global_batch,
        micro_batch=config.micro_batch or step.global_batch // (step.ranks or 1),
        report_every=1,
        run_log=False,
    )


def _run_masked(plan: BisectPlan, config: TrainConfig, masked: tuple[int, int]) -> float:
    """Continue the version before a step with samples masked, and return the metric of the step."""
    step = plan.batch.step.step
    skip = ",".join(filter(None, [config.skip, f"{step}:{masked[0]}-{masked[1]}"]))
    settings = {name: value for name, value in config.to_dict().items() if value is not None} | {"skip": skip}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"  # JSON is YAML
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "datasvc.trainer", "--config", str(path)]
        finished = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own program
    for line in finished.stdout.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "step" and event.get("step") == step and plan.metric in event:
            return float(event[plan.metric])
    raise ConfigError(
        f"a run from {plan.start or 'the beginning'} did not report {plan.metric} of step {step}: "
        f"{finished.stderr.strip()[-2000:] or 'see the events of the training program'}"
    )
