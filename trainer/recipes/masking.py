"""Masks samples of a run: those of a plan of `plan_forget`, and the steps of its setting `skip`.

Also the settings with which a run starts again at a version, to train with other samples masked.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.ledger.masked import Masked, with_masks
from datasvc.ledger.skipped_steps import StepCursor, parse_skip
from datasvc.loaders.core.mixture import splits_of
from datasvc.models import Checkpoint
from datasvc.models.provenance.consumed_ranges import parse_use, training_uses
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.models.versions.data_use import DataUse
from datasvc.repository.logs.references import split_words
from datasvc.trainer.recipes.run import Run
from datasvc.trainer.recipes.settings.config import TrainConfig, setting_fields

_BASE: Final = re.compile(r"^[^@\[:]+(@[^\[:]+)?")


def configs_of_plan(repo: DataRepository, plan: ForgetPlan) -> list[TrainConfig]:
    """Return the settings of the runs that forget, see `config_of_version`: one for each batch size of the steps.

    Each run continues the one before, whose last version is to be its `resume`. The last one ends where the model
    ended.
    """
    advice = "with `masked=repo.models.plan_forget(...).masked` for the loader"
    config = config_of_version(repo, plan.model, plan.start, advice=advice)
    entry = repo.repository.entry(repo.repository.resolve("models", plan.model, removed=True)).content
    uses = training_uses([DataUse.from_dict(use) for use in entry["data"]])
    if any(parse_use(use)[1] < (config.epochs, 0) for use in uses):
        # A version in the middle of its run, which ends there, too.
        config = replace(config, max_steps=plan.stop_step)
    configs: list[TrainConfig] = []
    for part in plan.repeated:
        global_batch = part.global_batch or config.global_batch
        if configs and configs[-1].global_batch == global_batch:
            configs.pop()
        is_last = part.stop_step == plan.stop_step
        max_steps = config.max_steps if is_last else part.stop_step
        configs.append(replace(config, global_batch=global_batch, max_steps=max_steps))
    return configs or [config]


def config_of_version(repo: DataRepository, ref: str, start: str | None, *, advice: str) -> TrainConfig:
    """Return the settings of the run that a version is of, for a run that starts at another version.

    Args:
        repo: repository of the versions.
        ref: the version.
        start: version to continue; None: start again.
        advice: how to run a program that is not `datasvc train`.

    Raises:
        ConfigError: the version is not of `datasvc train`, or its settings are not valid any more.
        NotFoundError, CorruptDataError, UnavailableError: the version cannot be read.
    """
    entry = repo.repository.entry(repo.repository.resolve("models", ref, removed=True)).content
    saved: dict[str, Any] = entry.get("config") or {}
    if not {"data", "model", "global_batch"} <= saved.keys():
        raise ConfigError(
            f"{ref} was not trained by `datasvc train`, so its program is not known: run it from "
            f"{start or 'its beginning'} {advice}"
        )
    names = {field.name for field in setting_fields()}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in names
    }
    # At any number of ranks, the steps have the batches that they had.
    uses = training_uses([DataUse.from_dict(use) for use in entry["data"]])
    spans = [span for use in uses for span in use.spans]
    values["global_batch"] = spans[-1].global_batch if spans else values["global_batch"]
    # In the versions that it read, whatever the settings name now.
    names_read = parse_use(uses[-1])[0].names if uses else ()
    values["data"] = " ".join(map(_in_version, split_words(str(values["data"])), names_read)) or values["data"]
    values |= {"repo": repo.repository.url, "name": ref.partition("@")[0], "resume": start or "never"}
    if start is not None:  # which has the weights that the run started with
        values |= {"init_from": None, "init_exclude": ()}
    return TrainConfig(**values)


def _in_version(reference: str, name: str) -> str:
    """Return `NAME[@V][...][:WEIGHT]` with the version of the split `name`, such as "pets@3/train"."""
    version = name.partition("[")[0].rpartition("/")[0]
    return f"{version}{_BASE.sub('', reference)}"


def mask_forgotten(run: Run, plan: ForgetPlan) -> None:
    """Mask the samples of a plan from the position of the run on. Every rank must call this before a batch.

    Raises:
        ConfigError: the run reads other data than the version of the plan, so nothing would be masked.
    """
    read = {split.digest for split in splits_of(run.loader.split)}
    if not {item.table for item in plan.masked.samples} <= read:
        raise ConfigError(
            f"{plan.model} read other data than this run, which therefore has other samples to mask: give --data the "
            "versions that it read"
        )
    state = run.loader.state_dict()
    _add_masks(run, plan.masked.since((state["epoch"], state["position"])))


def mask_skipped_steps(run: Run, repo: DataRepository, checkpoint: Checkpoint | None) -> None:
    """Mask the steps of the setting `skip`; every rank must call this, before the first batch.

    Raises:
        ConfigError: the weights have been trained on a step already, or a batch has fewer samples.
    """
    text = run.config.skip
    saved: dict[str, Any] = {} if checkpoint is None else checkpoint.entry.get("config") or {}
    # The state of a version that was trained with this setting has its positions, also after a change of batch sizes.
    if text is not None and saved.get("skip") != text:
        # So a list can grow from start to start, such as that of a file of settings.
        known = parse_skip(saved["skip"]) if saved.get("skip") else ()
        skipped, state = [item for item in parse_skip(text) if item not in known], run.loader.state_dict()
        first = min((item.first for item in skipped), default=run.step + 1)
        last = max((item.last for item in skipped), default=0)
        if first <= run.step:
            raise ConfigError(
                f"skip is {text!r}, and step {first} is in the weights of {run.version} already, which is of step "
                f"{run.step}; give {_advise_start(repo, run.config.name, first)}"
            )
        cursor = (run.loader.epoch, 0 if state["epoch"] != run.loader.epoch else state["position"])
        size = run.loader.split.num_positions
        steps = StepCursor(run.step, cursor, size, run.batches.global_batch, run.loader.tail)
        end = min(steps.step_after(run.config.epochs), run.config.max_steps or last)
        if last > end:
            raise ConfigError(
                f"skip is {text!r}, and the run ends at step {end}; give steps up to it, or raise --epochs or "
                "--max-steps"
            )
        _add_masks(run, steps.plan_masks(skipped))


def _advise_start(repo: DataRepository, name: str, first: int) -> str:
    """Return the setting that continues the last version before a step."""
    steps = {
        str(version): repo.models.describe(str(version)).entry.get("step") for version in repo.models.versions(name)
    }
    before = [version for version, step in steps.items() if step is not None and step < first]
    return f"--resume {before[-1]}, the last version before it" if before else "--resume never"


def _add_masks(run: Run, masked: Masked) -> None:
    """Mask samples beside those that the loader masks already; its states have them from here on."""
    run.loader.load_state_dict(with_masks(run.loader.state_dict(), run.loader.masked | masked))
