"""The training loop. Every rank runs the loop, all ranks save together, and rank 0 reports."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys

import torch

import datasvc.trainer as hvd
from datasvc.errors import ConfigError, NotFiniteError
from datasvc.models.provenance.forgetting import ForgetPlan
from datasvc.models.saving.preemption import SIGNALS
from datasvc.trainer.env.environment import read_placement
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.build import set_rate
from datasvc.trainer.recipes.checkpoints import commit, report_commits
from datasvc.trainer.recipes.choose_layout import choose_layout, count_replica_ranks, read_block_tokens
from datasvc.trainer.recipes.elastic_memory import ElasticMemory, reporting_lost_ranks
from datasvc.trainer.recipes.layouts.lost_ranks import LostRankWatch, explaining_lost_ranks, watching_round
from datasvc.trainer.recipes.mean_weights import using_mean_weights
from datasvc.trainer.recipes.model_check import has_finite_state
from datasvc.trainer.recipes.optimizers.catch_up import CatchUp
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.rank_check import check_job
from datasvc.trainer.recipes.reporting.events import choose_events
from datasvc.trainer.recipes.reporting.recorder import STEPS_PER_COMPARISON, LoggedEvents
from datasvc.trainer.recipes.run import Run, diagnose, report_profile, report_tuning
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.smoke import make_smoke_run, plan_smoke_config, read_smoke
from datasvc.trainer.recipes.start import start
from datasvc.trainer.recipes.tasks.batch_statistics import (
    batch_statistics,
    keeping_statistics,
    recompute_statistics,
    replace_statistics_by_averages,
)
from datasvc.trainer.recipes.tasks.task import evaluate
from datasvc.trainer.recipes.update import update
from datasvc.trainer.rendezvous.rendezvous import open_rendezvous


def train(config: TrainConfig, forget: ForgetPlan | None = None) -> str:
    """Train until the run is complete or stopped; return the last committed version, such as "digits-cnn@9".

    With `forget`, whose start `config` continues, the samples of the plan are masked.

    Every rank reports the events `start` and `restored`, and in an elastic run `round` at the start of each round.
    Rank 0 also reports `state_lost` if the ranks that had a part of a divided model are all lost, and the run
    continues a version. It reports `step`, `evaluation`, `checkpoint`, `local_checkpoint`, `refused` and `failed`
    (for a checkpoint; the run continues), `tournament` (a round), `loader` (what `tune_loader` has chosen, and why),
    `not_finite`, `profile`, and finally `end`, or `stopped` if a signal ended the run.

    Raises:
        SystemExit: after SIGTERM or Ctrl-C, once a last checkpoint is committed. The status is 128 plus the signal.
            After a smoke run, which has no version to return, with status 0.
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
        NotFiniteError: the training has diverged, and the settings have `stop_on_nan`.
        HorovodInternalError: a rank died, or submitted other operations than the other ranks. An elastic run
            continues with the other ranks. In another one, with a layout of other axes than data, a rank that does
            not leave its collectives then ends its process, and so does one that has not called `hvd.shutdown` 30 s
            later.
    """
    if config.uses_servers:
        raise ConfigError(
            f"sync is {config.sync!r}, with which the order of updates, and so the weights, can depend on the speed "
            "of workers: only `python -m datasvc.trainer` trains so, and no run is repeated to forget samples"
        )
    # An impossible layout is refused here, because the ranks would otherwise connect first.
    size = read_placement(os.environ).size
    smoke = read_smoke(os.environ, size)
    if smoke is not None:
        config = plan_smoke_config(config, smoke, size)
    rendezvous = open_rendezvous(os.environ) if config.elastic else None
    if rendezvous is not None:
        # The launcher forms rounds of whole replicas, and reports an error if there is none.
        multiple = rendezvous.multiple = count_replica_ranks(config)
        size = max(size - size % multiple, multiple)
    layout = choose_layout(config, size, block=read_block_tokens(config, size))
    hvd.init()
    # An elastic run has one in each round.
    watch = None if layout.is_data_only or config.elastic else LostRankWatch(lost_after_s=config.lost_after)
    events = LoggedEvents(choose_events(sys.stdout))
    if config.elastic and not runtime.is_elastic() and hvd.rank() == 0:
        sys.stderr.write(
            "elastic has no effect in a job whose ranks cannot change: start it with datasvc-run --min-num-proc "
            "(docs/how-to/elastic.md)\n"
        )
    events.report("start", rank=hvd.rank(), size=hvd.size(), pid=os.getpid())
    if not (config.elastic and runtime.is_elastic()):
        check_job(config)
    if smoke is not None:
        make_smoke_run(config, smoke, events, forget)
        hvd.shutdown()
        sys.exit(0)
    run = train_elastically(config, events, forget) if config.elastic else train_once(config, events, watch, forget)
    if watch is not None:
        watch.close()
    if not run.is_over:
        # The launcher kills the other ranks soon after the first has exited, and rank 0 may still write its logs.
        with contextlib.suppress(hvd.HorovodInternalError):  # of a lost rank, for which no rank must wait now
            hvd.barrier()
    return leave(run)


def leave(run: Run) -> str:
    """Shut the job down; return the last version, or raise SystemExit after a stop signal. See `train`."""
    hvd.shutdown()
    if not run.is_over:
        assert run.checkpoints.stop_signal is not None
        sys.exit(128 + run.checkpoints.stop_signal)
    assert run.version is not None
    return run.version


def train_once(
    config: TrainConfig, events: LoggedEvents, watch: LostRankWatch | None, forget: ForgetPlan | None = None
) -> Run:
    """Train with the ranks of now; return the run, whose resources are closed."""
    random_state.seed_all(config.seed)
    with explaining_lost_ranks(watch):
        run = start(config, events, forget=forget)
    if run.is_over and hvd.rank() == 0:
        reached = {"--epochs": run.is_served, "--max-steps": run.has_all_steps, "--patience": run.stop.is_reached}
        limits = " and ".join(option for option, is_reached in reached.items() if is_reached)
        sys.stderr.write(
            f"nothing is left to train: {run.version or run.config.name} is complete, at step {run.step}; to "
            f"continue it, raise {limits}\n"
        )
    try:
        with explaining_lost_ranks(watch):
            train_to_end(run, watch=watch)
    except BaseException as error:
        run.recorder.close(error)
        raise
    return run


def train_elastically(config: TrainConfig, events: LoggedEvents, forget: ForgetPlan | None = None) -> Run:
    """Train in rounds, between which ranks may be lost and join; return the run of the last round, closed."""

    def train_round(memory: ElasticMemory) -> Run:
        with watching_round(config) as watch, reporting_lost_ranks(), explaining_lost_ranks(watch):
            # In each round, because ranks join.
            check_job(config, has_begun=memory.snapshot is not None or memory.has_saved)
            # A round without a snapshot starts from the same random weights as the first one.
            random_state.seed_all(config.seed)
            run = start(memory.config, events, memory.snapshot, forget=forget)
            if memory.lost_parts and hvd.rank() == 0:
                events.report("state_lost", parts=list(memory.lost_parts), step=run.step, version=run.version)
            replicas = hvd.size() // count_replica_ranks(config)
            facts = {"kept_samples": run.rounds.num_applied} if isinstance(run.rounds, CatchUp) else {}
            place = {"rank": hvd.rank(), "size": hvd.size(), "replicas": replicas}
            events.report("round", **place, step=run.step, sync_s=memory.sync_s, **facts)
            with memory.holding(run):
                if memory.snapshot is not None and run.is_over:
                    # A rank was lost during the last evaluation, or while the last checkpoint was written. A second
                    # one of that state does no harm.
                    with run.checkpoints:
                        commit(run) if memory.snapshot.ends_epoch else end_epoch(run)
                    end(run)
                else:
                    train_to_end(run, memory)
        return run

    run: Run = hvd.elastic.run(train_round)(ElasticMemory(config))
    return run


def train_to_end(run: Run, memory: ElasticMemory | None = None, watch: LostRankWatch | None = None) -> None:
    """Train until the run is complete or a stop signal arrives, and close what it has opened."""
    with run.checkpoints:
        # Inside, because the end of this context waits for a save, which waits for the lost rank until the watch has
        # found it.
        with explaining_lost_ranks(watch):
            go_through_epochs(run, memory)
        if run.checkpoints.stop_signal is not None:
            # The launcher signals the other ranks as soon as the first one exits. Each rank ignores this signal,
            # because it is exiting already.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    end(run)


def go_through_epochs(run: Run, memory: ElasticMemory | None = None) -> None:
    """Train until the run is complete or a stop signal arrives. On return, a save of the last state is queued.

    `memory` gets copies of the state of an elastic run.
    """
    is_evaluated = memory is not None and memory.snapshot is not None and memory.snapshot.ends_epoch
    # True if the run continues a state that was saved after the last step of an epoch, but before its evaluation.
    if run.loader.state_dict()["epoch"] < run.loader.epoch and not (run.is_over or is_evaluated):
        end_epoch(run)
        if memory is not None:
            memory.commit_when_due(is_due=True, ends_epoch=True)
    timer = run.recorder.timer
    timer.restart()
    while not run.is_over:
        # Read the progress before taking a batch, because the loader counts a batch as soon as it returns it.
        progress, epoch = run.loader.progress, run.loader.epoch
        for batch in run.loader:
            timer.got_batch()
            if run.rounds is not None:
                run.rounds.got_batch()
            rate = run.schedule.rate_at(progress, after=run.loader.progress)
            set_rate(run.optimizer, rate, progress)
            progress = run.loader.progress
            was_choosing = is_choosing_buckets(run)
            is_report_due = (run.step + 1) % run.config.report_every == 0
            run.shares_loss = is_report_due and run.rounds is None
            if run.rounds is not None and not len(batch.positions):
                loss = torch.zeros((), device=run.device)  # nothing of a round is left for this rank
            else:
                loss = update(run, batch, timer.begin_parts(run.step))
            if run.task.losses:
                # The first step of a pipeline computes a loss more beforehand, to find its shapes.
                run.loader.record(batch, torch.cat(run.task.losses)[-len(batch.positions) :])
                run.task.losses.clear()
            run.step += 1
            run.is_updating = False
            if memory is not None:
                memory.end_step()
            start_step = run.step - 1
            if run.rounds is not None:
                shared_loss = run.rounds.end_step(loss, len(batch.positions))
                if shared_loss is None:
                    timer.end_step()
                    continue  # only after a round are all ranks at the same step
                loss, start_step, run.step = shared_loss, run.rounds.start_step, run.rounds.step
                is_report_due = has_passed(run.config.report_every, start_step, run.step)
            report_round(run)
            ended = run.rounds
            if ended is not None and ended.is_last:
                run.rounds = None
            if was_choosing and not is_choosing_buckets(run):
                report_buckets(run)
            # Reading the loss waits for the device. All ranks read it, so that no rank runs ahead of rank 0.
            shown_loss = float(loss) if is_report_due else None
            timer.end_step()
            if shown_loss is not None:
                samples = None if ended is None else ended.samples_per_step
                report_step(run, epoch=batch.epoch, loss=shown_loss, rate=rate, samples=samples)
                if not math.isfinite(shown_loss):
                    report_not_finite(run, shown_loss)
            run.recorder.compare_ranks(run.step, now=has_passed(STEPS_PER_COMPARISON, start_step, run.step))
            report_commits(run)
            if (to := run.checkpoints.should_save(run.step, since=start_step)) and not run.is_over:
                # The metrics of an earlier evaluation do not describe this state.
                run.metrics, run.average_statistics = {}, {}
                report_not_finite(run)
                commit(run, due=run.checkpoints.stop_signal is None, to=to)
                if run.checkpoints.stop_signal is not None:
                    return
            if memory is not None and not run.is_over:
                memory.commit_when_due(is_due=has_passed(run.config.commit_every, start_step, run.step))
            timer.restart()
            if run.is_cut_short:
                break
        loading = run.loader.report() if run.config.tune_loader else None  # before a profile restarts it
        if run.config.profile is not None:
            report_profile(run, run.config.profile, epoch)
        end_epoch(run)
        if loading is not None and not run.is_over:
            report_tuning(run, loading)
        if memory is not None:
            memory.commit_when_due(is_due=True, ends_epoch=True)
        timer.restart()


def end_epoch(run: Run) -> None:
    """Evaluate and commit the state at the end of an epoch, if that is due."""
    run.recorder.compare_ranks(run.step, now=True)
    run.recorder.report_diagnosis(run.step, lambda: diagnose(run), now=True)
    # Always evaluate and commit the last state of the run, whatever the period is.
    if run.is_over or is_due(run.loader.epoch, run.config.evaluate_every):
        report_not_finite(run)
        run.metrics = evaluate_run(run)
        run.stop.update(run.metrics)
        commit(run)


def has_passed(every: int, before: int, after: int) -> bool:
    """Return whether a multiple of `every` is among the steps after `before` up to `after`."""
    return after // every > before // every


def is_due(epoch: int, every: int | None) -> bool:
    """Return whether an action with a period of `every` epochs is due after `epoch` epochs."""
    return every is not None and epoch > 0 and epoch % every == 0


def evaluate_run(run: Run) -> dict[str, float]:
    """Return the metrics of the weights and, with prefix `ema_`, of their average; {} without a validation split."""
    if run.val_loader is None and not run.config.recomputes_statistics:
        return {}
    with run.recorder.busy("evaluation"), using_mean_weights(run):
        return _evaluate(run)


def _evaluate(run: Run) -> dict[str, float]:
    # Close the training loader first, so that the cache need not hold the shards of both loaders at once.
    run.loader.close()
    prepare_statistics(run)
    if run.val_loader is None:
        return {}
    metrics = evaluate(run.task, run.model, run.val_loader, run.device, run.config.precision, run.divided)
    if run.average is not None:
        with run.average.applied(), keeping_statistics(run.model):
            if run.config.recomputes_statistics:
                prepare_statistics(run)
                run.average_statistics = {name: value.clone() for name, value in batch_statistics(run.model).items()}
            averaged = evaluate(run.task, run.model, run.val_loader, run.device, run.config.precision, run.divided)
        metrics |= {f"ema_{name}": value for name, value in averaged.items()}
    run.val_loader.close()
    if hvd.rank() == 0:
        run.events.report("evaluation", step=run.step, epoch=run.loader.epoch, **metrics)
        for log in run.logs.values():
            log.log(run.step, metrics)
    return metrics


def prepare_statistics(run: Run) -> None:
    """Make the statistics of batch normalisation those to evaluate with, equal on all ranks."""
    if run.statistics_loader is None:
        if getattr(run.optimizer, "tournament", None) is None:  # else all ranks have those of the winner
            replace_statistics_by_averages(run.model)
        return
    # Use the batches that training takes next: a resumed run then computes the same statistics, and what the cache
    # fetches for them is what training needs too.
    run.statistics_loader.load_state_dict(run.loader.state_dict())
    batches = itertools.chain.from_iterable(itertools.repeat(run.statistics_loader))  # over all epochs
    # In training mode, layers such as dropout draw random numbers, which training must not miss.
    random = random_state.capture()
    with autocast(run.config.precision, run.device):
        recompute_statistics(
            run.model,
            (
                part
                for batch in itertools.islice(batches, run.config.statistics_batches)
                for part in run.task.unpack(batch, run.device).split(run.batches.micro_batch)
            ),
        )
    random_state.reinstate(random)
    run.statistics_loader.close()


def report_not_finite(run: Run, loss: float | None = None) -> None:
    """Report once that the training has diverged: its loss or its weights are NaN or infinite. Every rank calls this.

    Args:
        run: run of this rank.
        loss: loss of this step that is not finite, equal on all ranks; None: look at the weights.

    Raises:
        NotFiniteError: the settings have `stop_on_nan`.
    """
    if run.not_finite_since is not None:
        return
    # With a loss scale, a step whose loss overflows is skipped, and the weights stay as they were.
    if (loss is None or run.loss_scale.is_enabled()) and has_finite_state(run):
        return
    run.not_finite_since = run.step
    what = "the weights are" if loss is None else f"the loss is {loss}, which is"
    if hvd.rank() == 0:
        run.events.report("not_finite", step=run.step, loss=loss)
    if run.config.stop_on_nan:
        if run.loader.signals is not None:
            run.loader.signals.flush()  # the losses of this step tell which samples were not finite
        raise NotFiniteError(
            f"{what} not finite after step {run.step}, and --stop-on-nan ends the run; {_describe_newest(run)}"
        )


def _describe_newest(run: Run) -> str:
    newest = run.checkpoints.version
    return "it has saved no version" if newest is None else f"its newest version is {newest}, of an earlier step"


def is_choosing_buckets(run: Run) -> bool:
    """Return whether the optimizer still measures steps for `--bucket auto`."""
    return getattr(run.optimizer, "is_choosing_buckets", False)


def report_buckets(run: Run) -> None:
    """Report from rank 0 the size of buckets that `--bucket auto` has chosen, and the measured all-reduce times."""
    if hvd.rank() == 0:
        cost = run.optimizer.all_reduce_cost
        run.events.report(
            "buckets",
            step=run.step,
            bucket_bytes=run.optimizer.bucket_bytes,
            all_reduce_s=cost.alpha_s,
            s_per_byte=cost.beta_s,
        )


def report_round(run: Run) -> None:
    """Report from rank 0 the round of a tournament, if the last step ended with one."""
    tournament = getattr(run.optimizer, "tournament", None)
    if tournament is not None and hvd.rank() == 0 and run.optimizer.sync_policy.is_round(run.optimizer.num_steps):
        run.events.report("tournament", **{**tournament.rounds[-1], "step": run.step})


def report_step(run: Run, *, epoch: int, loss: float, rate: float, samples: float | None = None) -> None:
    """Report from rank 0: loss and learning rate of the step, and the mean times of the steps since the last report.

    `samples` are those of all ranks for each step of this rank; None: the global batch.

    The loss is that of the global batch; the times are those of rank 0, for which all ranks wait in each step.
    """
    samples = round(run.batches.global_batch if samples is None else samples)
    times_s = run.recorder.timer.take()  # on every rank, because the call restarts the means
    step_s, wait_s = times_s["step_s"], times_s["wait_s"]
    progress = run.loader.progress
    curves = {"loss": loss, "rate": rate, f"{run.task.unit}_per_s": samples / step_s}
    # At the end of an epoch, samples that do not fill a batch may be left, and the epoch is over all the same.
    done = (progress if run.loader.steps_left else epoch + 1) / run.config.epochs
    if run.config.max_steps is not None:
        done = min(1.0, max(done, run.step / run.config.max_steps))
    facts = {"epoch": epoch, "progress": done, "coverage": progress - epoch, **curves}
    run.recorder.report_step(run.step, times_s, {**facts, "unit": run.task.unit})
    run.recorder.report_diagnosis(run.step, lambda: diagnose(run))
    if hvd.rank() != 0:
        return
    run.events.report(
        "step",
        step=run.step,
        epoch=epoch,
        progress=done,
        loss=loss,
        rate=rate,
        step_s=step_s,
        wait_s=wait_s,
        samples=samples,
        unit=run.task.unit,
    )
    values = {**curves, "data_stall": wait_s / step_s}
    for log in run.logs.values():
        log.log(run.step, values)


def end(run: Run) -> None:
    """Close the run's resources, and report its end from rank 0."""
    report_commits(run)
    if run.checkpoints.version is not None:
        # The manager has committed the newest version at its end, if that was on the nodes only.
        run.version = str(run.checkpoints.version)
    run.stop_metrics()
    run.loader.close()
    for loader in (run.val_loader, run.statistics_loader):
        if loader is not None:
            loader.close()
    if run.cache is not None:
        run.cache.close()
    if run.nodes is not None:
        hvd.barrier()  # a node must not stop its server while another node fetches from it
        run.nodes.close()
    if hvd.rank() == 0:
        for log in run.logs.values():
            log.close()
        if run.is_over:
            run.events.report("end", version=run.version, step=run.step, **run.metrics)
        else:
            run.events.report("stopped", version=run.version, step=run.step, signal=run.checkpoints.stop_signal)
        if run.not_finite_since is not None:
            sys.stderr.write(
                f"the training has diverged: since step {run.not_finite_since} its loss or its weights are not "
                f"finite, and {run.version} is of no use; started again, the run continues the newest version "
                "with finite weights (--stop-on-nan ends a run at once; a lower --learning-rate may help)\n"
            )
        run.recorder.close(signal=None if run.is_over else run.checkpoints.stop_signal)
