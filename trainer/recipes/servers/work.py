"""A worker of a job with parameter servers: computes the gradients of the parts of steps that it is granted."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import nn

import datasvc
from datasvc.loaders.core.parts import end_epochs_before, take_part
from datasvc.planning.layout import Layout
from datasvc.trainer.recipes import random_state
from datasvc.trainer.recipes.build import build_model, compile_model
from datasvc.trainer.recipes.layouts.shard import recompute_activations
from datasvc.trainer.recipes.optimizers.precision import make_loss_scale
from datasvc.trainer.recipes.reporting.recorder import mark_nothing
from datasvc.trainer.recipes.servers.server_job import ServerJob, check_settings
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.start import open_cache
from datasvc.trainer.recipes.training_data import choose_task, open_data, resolve_data
from datasvc.trainer.recipes.update import Learner, accumulate
from datasvc.trainer.servers.worker_client import WorkerClient


def work(config: TrainConfig, job: ServerJob) -> None:
    """Compute gradients until server 0 ends the job.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data, or are not those of server 0.
        HorovodInternalError: a server is lost, or the job goes on without this worker.
    """
    worker = job.placement.rank - job.num_servers
    client = WorkerClient(
        job.store, worker=worker, num_servers=job.num_servers, timeout_s=job.timeout_s, lost_after_s=config.lost_after
    )
    with client:
        _work(config, job, client)


def _work(config: TrainConfig, job: ServerJob, client: WorkerClient) -> None:
    check_settings(config, client.welcome["config"], job.placement.rank)
    random_state.seed_all(random_state.seed_of_rank(config.seed, job.placement.rank))
    repo = datasvc.open(config.repo)
    # The next part is not known in advance, so none is decoded in advance.
    config = dataclasses.replace(config, prefetch=0)
    data = open_data(repo, config, resolve_data(repo, config))
    task = choose_task(config, data.train)
    config = dataclasses.replace(config, model=config.model or task.default_model)
    batches = plan_batches(config, job.num_workers)
    place = job.place_worker(config)
    with contextlib.ExitStack() as stack:
        cache, _ = open_cache(config)
        if cache is not None:
            stack.enter_context(cache)
        loader = task.open_loader(data.train, training=True, batch_size=batches.batch_size, cache=cache, place=place)
        stack.callback(loader.close)
        loader.load_state_dict(client.welcome["loader"])  # it refuses other data than those of server 0
        task.masks_samples = bool(loader.masked)
        model = build_model(config, task).to(place.device)
        model.load_state_dict(client.welcome["model"])
        if config.recompute:
            recompute_activations(model)
        compile_model(model, config.compile)
        learner = Learner(
            config, task, batches, Layout(data=job.num_workers), model, None,
            make_loss_scale(config.precision, place.device), None, place.device,
        )  # fmt: skip
        parameters = dict(model.named_parameters())
        weights = [[parameters[name] for name in names] for names in client.welcome["names"]]
        while (grant := client.next_grant()) is not None:
            batch = take_part(loader, grant.epoch, grant.position, grant.part, lost_ranks=grant.lost)
            examples = task.unpack(batch, place.device)
            client.pull(weights)
            model.zero_grad()
            # The sum over the targets: the servers divide it.
            loss = accumulate(learner, examples, 1, mark_nothing)
            client.push(
                grant,
                [[_gradient(weight) for weight in part] for part in weights],
                loss=float(loss),
                num_targets=task.count_targets(examples),
            )
        end_epochs_before(loader, client.end["epoch"])


def _gradient(weight: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
