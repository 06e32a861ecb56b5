"""What saving in the background costs the steps of a training: the same loop with saves and without, by turns.

A cycle is all steps from a save to the moment at which `max_stall` allows the next one; before and after it, half as
many run without saves. Prints a JSON list: the figures of each cycle. `models.py` shows them.

    PYTHONPATH=. python -P tools/bench/models_overhead.py FOLDER {sgd,adamw} [--cycles 3] [--max-stall 3%]
        [--model resnet18]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track

import datasvc
from datasvc.models import CheckpointManager
from datasvc.trainer.recipes.models import MODELS
from tools.bench.models_training import Training

WARM_UP_STEPS: Final = 5


@dataclass(frozen=True)
class Cycle:
    """A save, and the steps up to the next one.

    Attributes:
        num_steps: as many.
        took_s: all of it.
        stall_s: for which the save stopped the training, as the model counted it.
        slowed_s: by which steps took longer beside its writing, as the model counted it.
        plain_step_s: what a step takes without saves, before and after.
    """

    num_steps: int
    took_s: float
    stall_s: float
    slowed_s: float
    plain_step_s: float = 0.0


class Turns:
    """A training that runs with saves and without, by turns.

    Args:
        training: takes the steps.
        saved: what it saves to, by its `should_save`.
    """

    def __init__(self, training: Training, saved: CheckpointManager) -> None:
        self._training = training
        self._saved = saved
        self._step = 0

    def run_plain(self, num_steps: int) -> float:
        """Return the seconds that a step takes without saves."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self._training.step()
        return (time.perf_counter() - began) / num_steps

    def run_to_save(self) -> None:
        """Go on until a save is due."""
        while not self._take_step():
            pass

    def run_cycle(self) -> Cycle:
        """Save, and go on until the next save is due."""
        before, began, first = self._saved.cost, time.perf_counter(), self._step
        state = {"model": self._training.model.state_dict(), "optimizer": self._training.optimizer.state_dict()}
        self._saved.save(state, step=first)
        self.run_to_save()
        took_s = time.perf_counter() - began
        spent = self._saved.cost - before
        return Cycle(self._step - first, took_s, spent.stall_s, spent.slowed_s)

    def _take_step(self) -> bool:
        self._training.step()
        self._step += 1
        return self._saved.should_save(self._step)


def measure(settings: argparse.Namespace) -> list[Cycle]:
    """Return the figures of each cycle."""
    training = Training(settings.optimizer, frozen=False, model=settings.model)
    repository = datasvc.open(str(settings.folder), create=True)
    console = Console(stderr=True)
    with repository.models.manager("net", max_stall=settings.max_stall) as saved:
        turns, cycles = Turns(training, saved), []
        turns.run_plain(WARM_UP_STEPS)
        turns.run_to_save()
        # The first save has no other to be a difference to, and memory to touch: it is not counted.
        before_s = turns.run_plain(turns.run_cycle().num_steps // 2)
        numbers = track(
            range(settings.cycles), "steps beside saves", console=console, disable=not console.is_terminal
        )
        for _ in numbers:
            cycle = turns.run_cycle()
            after_s = turns.run_plain(cycle.num_steps // 2)
            cycles.append(replace(cycle, plain_step_s=(before_s + after_s) / 2))
            before_s = after_s
    return cycles


def main() -> None:
    """Parse the command line, train, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the repository to save to, which is made")
    parser.add_argument("optimizer", choices=("sgd", "adamw"))
    parser.add_argument("--cycles", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--max-stall", default="3%", help="default: %(default)s")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet18", help="default: %(default)s")
    print(json.dumps([asdict(cycle) for cycle in measure(parser.parse_args())]))


if __name__ == "__main__":
    main()
