"""Opens the run that a profile measures: model, optimizer and loaders as in training, but no checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.errors import ConfigError
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.profiling.step_times import TimeSpan
from datasvc.trainer.recipes.build import build_learner
from datasvc.trainer.recipes.choose_layout import choose_layout
from datasvc.trainer.recipes.profiling.measure.layer_times import synchronize
from datasvc.trainer.recipes.rejoin import call_on_first_rank
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.start import choose_place, open_cache
from datasvc.trainer.recipes.training_data import choose_task, open_data, resolve_data
from datasvc.trainer.recipes.update import Learner

PARTS: Final = ("io", "transfer", "targets", "forward", "backward", "all-reduce", "update")
WALL, OWN, BESIDE = range(3)  # the columns of `StepPartTimer.table`
_THREAD: Final = 1  # the row of the training thread in a trace


class LoadersInTurn:
    """Yields batches without end from one of two loaders with the same access order; `turn_to` selects the loader.

    The selected loader continues at the position of the other one. Both therefore read shards that neither has read
    before in this epoch, and their costs can be compared. Only one loader is open at a time, so the cache needs room
    for the shards of one loader only.

    Args:
        at_call: loader without prefetching, which makes a batch when it is called for; selected at first.
        ahead: loader of the same access order, with prefetching.
    """

    def __init__(self, at_call: Loader[Any], ahead: Loader[Any]) -> None:
        self._at_call, self._ahead = at_call, ahead
        self.current = at_call
        """The selected loader."""
        self._batches = _endless_batches(at_call)

    def turn_to(self, *, ahead: bool) -> None:
        """Select the prefetching loader if `ahead`, else the other one. A change makes earlier batches invalid."""
        selected = self._ahead if ahead else self._at_call
        if selected is self.current:
            return
        self.close()
        selected.load_state_dict(self.current.state_dict())
        self.current, self._batches = selected, _endless_batches(selected)

    def __next__(self) -> Any:
        """Return the next batch; it is valid until the next call."""
        return next(self._batches)

    def close(self) -> None:
        """Close the selected loader."""
        self._batches.close()
        self.current.close()


def _endless_batches(loader: Loader[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader  # one epoch


@dataclass
class ProfiledRun(Learner):
    """The profiled run of one rank. Its learning rate is 0, so that steps do not change the model.

    Attributes:
        loaders: loaders of the training split: one that prefetches at least one batch, and one without prefetching.
        num_threads: number of decoding threads beside the training thread.
    """

    loaders: LoadersInTurn
    num_threads: int

    def reduce_during_backward(self, *, overlapped: bool) -> None:
        """Choose whether gradients are all-reduced during or after the backward pass; reset the count of passes."""
        # The optimizer sends a gradient in the last of the passes that it expects. If it expects one more pass than
        # the step has, it sends everything in `synchronize`.
        self.optimizer.set_backward_passes_per_step(self.batches.num_passes + (not overlapped))


@contextlib.contextmanager
def open_profiled_run(config: TrainConfig) -> Iterator[ProfiledRun]:
    """Open the run of this rank; close its loaders and servers at the end of the context. Every rank must call this.

    Raises:
        ConfigError, NotFoundError, CacheFullError: the settings do not fit the data.
    """
    if config.combines_steps:
        raise ConfigError("op is adasum; a profile measures all-reduces of gradients: give --op average")
    if config.averages_weights:
        raise ConfigError(f"sync is {config.sync}; a profile measures all-reduces of gradients: give --sync bsp")
    repo = datasvc.open(config.repo)
    versions = call_on_first_rank(lambda: resolve_data(repo, config), name="profile")
    samples = open_data(repo, config, versions).train
    task = choose_task(config, samples)
    # A profile is no run of which others have a part: it leaves no ledger, and decodes what it measures.
    config = dataclasses.replace(config.without_records(), model=config.model or task.default_model)
    layout = choose_layout(config, hvd.size())
    if not layout.is_data_only:
        raise ConfigError(f"layout is {layout}; a profile measures replicas of the model: leave out --layout")
    batches, place = plan_batches(config, hvd.size()), choose_place(config, layout)
    with contextlib.ExitStack() as stack:
        cache, nodes = open_cache(config)
        if nodes is not None:
            stack.callback(nodes.close)

        def open_loader(prefetch: int) -> Loader[Any]:
            # Each loader needs its own task, because it takes `prefetch` from the configuration of the task.
            loader_task = choose_task(dataclasses.replace(config, prefetch=prefetch), samples)
            return loader_task.open_loader(
                samples, training=True, batch_size=batches.batch_size, cache=cache, place=place
            )

        loaders = LoadersInTurn(open_loader(0), open_loader(max(1, config.prefetch)))
        stack.callback(loaders.close)
        learner = build_learner(config, task, batches, place, layout)
        # At rate 0 a step does all the work of a training step, but does not change the weights.
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.0
        yield ProfiledRun(**vars(learner), loaders=loaders, num_threads=place.num_threads)
        # Only without an error: after an error of this rank, the others would not arrive at the barrier. The stack
        # closes the loaders and the node in both cases.
        loaders.close()
        if nodes is not None:
            hvd.barrier()  # a node must not stop its server while another node still fetches from it


class StepPartTimer:
    """Measures the parts of one step. The first part starts at construction.

    A part lasts until the device has completed its work. A part that is marked several times is summed.

    Attributes:
        table: `float64[part, kind of time]`. Parts are in the order of `PARTS`. The kinds of time are WALL: seconds;
            OWN: processor time of the training thread, without waiting for the device; BESIDE: processor time of all
            other threads of the process.
        spans: the marked parts in order, one for each mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.table: npt.NDArray[np.float64] = np.zeros((len(PARTS), 3))
        self.spans: list[TimeSpan] = []
        self._last = self._now()

    def mark(self, part: str) -> None:
        """Mark the end of `part` and the start of the next part."""
        # Read before waiting for the device, because CUDA uses processor time while it waits.
        worked_until_s = time.thread_time()
        synchronize(self._device)
        now = self._now()
        passed_s, own_s, all_s = now - self._last
        worked_s = worked_until_s - self._last[1]
        self.table[PARTS.index(part)] += (passed_s, worked_s, max(0.0, all_s - own_s))
        self.spans.append(TimeSpan(part, _THREAD, "step", round(self._last[0] * 1e9), round(passed_s * 1e9), 1))
        self._last = now

    @staticmethod
    def _now() -> npt.NDArray[Any]:
        """Return the seconds of the wall clock, and the processor time of this thread and of the whole process."""
        return np.array([time.perf_counter(), time.thread_time(), time.process_time()])
