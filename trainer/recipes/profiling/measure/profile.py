"""A profile: the measurements of a job, the predictions made from them, and both as text and JSON.

`command.py` makes and prints it. The symbols in the text, such as t_io, are those of `StepCosts`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.planning.prediction import Prediction, find_limit
from datasvc.planning.step import Message, StepCosts, StepMode, exposed_reduce_s, step_time
from datasvc.trainer.recipes.profiling.measure.compressions import ReduceCost, describe_compressed, predict_compressed
from datasvc.trainer.recipes.profiling.measure.layers import LayerCost, Layers
from datasvc.trainer.recipes.profiling.measure.messages import StepTraffic
from datasvc.trainer.recipes.settings.config import TrainConfig

_MAX_AHEAD_OVER_IO: Final = 1.1  # if `ahead_over_io` is larger in most rounds, the profile has a note


@dataclass(frozen=True)
class MeasuredRound:
    """The costs of a step, and the times of whole steps that were measured right after them.

    Attributes:
        costs: costs that were measured in this round.
        ahead_over_io: time per batch with prefetching divided by the time without, as measured. A value above 1 is
            noise, so t_a in `costs` is limited to t_io.
        measured_s: seconds per step of each mode (arrangement of the parts of a step) that was run.
    """

    costs: StepCosts
    ahead_over_io: float = 1.0
    measured_s: Mapping[StepMode, float] = dataclasses.field(default_factory=dict)

    def ratio(self, mode: StepMode) -> float:
        """Return the predicted seconds of a step in a mode that was run, divided by the measured seconds."""
        return step_time(self.costs, mode) / self.measured_s[mode]

    def to_dict(self) -> dict[str, Any]:
        """Return costs and seconds per step as JSON values."""
        predicted_s = {mode: step_time(self.costs, mode) for mode in StepMode}
        return {
            "costs": dataclasses.asdict(self.costs),
            "predicted_s": predicted_s,
            "measured_s": dict(self.measured_s),
        }


@dataclass(frozen=True)
class Profile:
    """The measurements of all rounds; its costs are the medians over the rounds.

    Attributes:
        world_size: ranks of the job that was measured.
        config: effective settings of that job.
        unit: name of the samples, in the plural, such as "images".
        rounds: measurements of the rounds, at least one.
        layers: layers as rank 0 measured them.
        traffic: messages of a step of the job.
        predictions: predictions for other clusters.
        reduces: costs of gradients with the run's compression, then with others; empty if none were measured.
    """

    world_size: int
    config: TrainConfig
    unit: str
    rounds: Sequence[MeasuredRound]
    layers: Layers
    traffic: StepTraffic
    predictions: Sequence[Prediction] = ()
    reduces: Sequence[ReduceCost] = ()

    @property
    def costs(self) -> StepCosts:
        """The median of each number over the rounds."""
        return median_costs([measured.costs for measured in self.rounds])

    @property
    def notes(self) -> list[str]:
        """Notes on the validity of the numbers."""
        notes = []
        ratios = [measured.ahead_over_io for measured in self.rounds if measured.ahead_over_io > _MAX_AHEAD_OVER_IO]
        # A few slow rounds are noise that the medians remove.
        if 2 * len(ratios) > len(self.rounds):
            notes.append(
                f"note: a prefetched batch took {statistics.median(ratios):.2f} times as long as one without "
                "prefetching, which is noise. t_a is limited to t_io; use more --steps, or a quieter machine"
            )
        if self.predictions and self.world_size == 1:
            notes.append(
                "note: this profile is of one rank, which launches no all-reduce and waits for no rank: the "
                "predictions leave out negotiation, launching and the slowest rank; profile two ranks or more"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        costs = self.costs
        # Only the modes that were run; without --check there are none.
        checked = {
            mode: {
                "measured_s": statistics.median(measured.measured_s[mode] for measured in self.rounds),
                "predicted_over_measured": statistics.median(measured.ratio(mode) for measured in self.rounds),
            }
            for mode in StepMode
            if mode in self.rounds[0].measured_s
        }
        return {
            "world_size": self.world_size,
            "config": self.config.to_dict(),
            "prefetch": max(1, self.config.prefetch),
            "costs": dataclasses.asdict(costs),
            "message_s": self.traffic.message_s,
            "hooks_overhead": self.layers.overhead,
            "layers": [dataclasses.asdict(layer) for layer in self.layers.costs],
            "step_s": {mode: step_time(costs, mode) for mode in StepMode},
            "measured": checked,
            "verdict": dataclasses.asdict(find_limit(costs)),
            "rounds": [measured.to_dict() for measured in self.rounds],
            "predictions": [dataclasses.asdict(prediction) for prediction in self.predictions],
            "compressions": [dataclasses.asdict(step) for step in predict_compressed(costs, self.reduces)],
            "notes": self.notes,
        }

    def describe(self, top: int) -> str:
        """Return tables of parts, the `top` slowest layers, modes and predictions, and the limiting resource."""
        ranks = f"{self.world_size} ranks, {self.costs.samples} {self.unit} each"
        return "\n".join(
            [
                f"{self.config.model}, {ranks}, median of {len(self.rounds)} rounds",
                *self._parts(),
                "",
                *self._slowest_layers(top),
                "",
                *self._modes(),
                *self._other_clusters(),
                *(["", *describe_compressed(predict_compressed(self.costs, self.reduces))] if self.reduces else []),
                "",
                *self.notes,
                str(find_limit(self.costs)),
            ]
        )

    def _parts(self) -> list[str]:
        costs = self.costs
        rows = [
            ("t_io", "fetch and decode, not prefetched", costs.io_s),
            ("t_a", "fetch and decode, prefetched", costs.ahead_s),
            ("t_i", "part of t_io in training thread", costs.caller_s),
            ("t_h2d", "host to device", costs.transfer_s),
            ("t_n", "summing the targets of all ranks", costs.targets_s),
            ("t_f", "forward", costs.forward_s),
            ("t_b", "backward", costs.backward_s),
            ("t_l", "launching all-reduces", costs.launch_s),
            ("t_c", f"all-reduce, {len(costs.messages)} messages", costs.reduce_s),
            ("t_c^no", "part of t_c not hidden by backward", exposed_reduce_s(costs)),
            ("t_w", "waiting for the slowest rank", costs.skew_s),
            ("t_u", "update", costs.update_s),
            ("w_io", "loader threads, processor time", costs.io_beside_s),
            ("w_c", "all-reduce threads, processor time", costs.reduce_beside_s),
        ]
        return (
            [f"{'':<8}{'part':<34}{'ms/step':>10}"]
            + [f"{symbol:<8}{name:<34}{seconds * 1e3:>10.2f}" for symbol, name, seconds in rows]
            + [f"{'k':<8}{'time lost per second of w_io, w_c':<34}{costs.contention:>10.2f}"]
        )

    def _slowest_layers(self, top: int) -> list[str]:
        layers = sorted(self.layers.costs, key=lambda layer: -layer.forward_s - layer.backward_s)
        layers, others = layers[:top], layers[top:]
        if others:
            forward_s, backward_s = (
                sum(layer.forward_s for layer in others),
                sum(layer.backward_s for layer in others),
            )
            gradient_bytes = sum(layer.gradient_bytes for layer in others)
            layers.append(LayerCost(f"{len(others)} more", forward_s, backward_s, gradient_bytes))
        title = "layer" if self.config.compile is None else "layer, not compiled"
        return [
            f"{title:<42}{'t_f ms':>10}{'t_b ms':>10}{'gradient':>12}",
            *(
                f"{layer.name:<42}{layer.forward_s * 1e3:>10.3f}{layer.backward_s * 1e3:>10.3f}"
                f"{layer.gradient_bytes / 1e6:>9.2f} MB"
                for layer in layers
            ),
            f"hooks changed the time by {self.layers.overhead:+.1%}; the times above are those without hooks",
        ]

    def _modes(self) -> list[str]:
        costs = self.costs
        lines = [f"{'mode':<14}{'predicted ms':>14}{self.unit + '/s':>12}{'measured ms':>14}{'ratio':>18}"]
        for mode in StepMode:
            predicted_s = step_time(costs, mode)
            # All ranks take equally many samples in a step.
            line = f"{mode:<14}{predicted_s * 1e3:>14.2f}{costs.samples * self.world_size / predicted_s:>12,.0f}"
            if mode in self.rounds[0].measured_s:
                measured_s = statistics.median(measured.measured_s[mode] for measured in self.rounds)
                ratios = sorted(measured.ratio(mode) for measured in self.rounds)
                spread = f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
                line += f"{measured_s * 1e3:>14.2f}{statistics.median(ratios):>6.3f} {spread:>11}"
            lines.append(line)
        return lines

    def _other_clusters(self) -> list[str]:
        if not self.predictions:
            return []
        lines = ["", f"for {self.predictions[0].cluster.describe()}, {self.costs.samples} {self.unit} a rank"]
        lines.append(f"{'ranks':>6}  {'mode':<14}{'ms/step':>10}{self.unit + '/s':>14}{'efficiency':>12}")
        for prediction in self.predictions:
            lines += [
                f"{prediction.world_size:>6}  {mode:<14}{prediction.step_s[mode] * 1e3:>10.2f}"
                f"{prediction.samples_per_s[mode]:>14,.0f}{prediction.efficiency[mode]:>12.1%}"
                for mode in StepMode
            ]
        return lines


def median_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """Return the median of each number over several measurements of one step."""
    numbers = {
        field.name: statistics.median(getattr(measured, field.name) for measured in costs)
        for field in dataclasses.fields(StepCosts)
        if field.name not in ("messages", "samples")
    }
    end_s = numbers["forward_s"] + numbers["backward_s"]
    messages = tuple(
        Message(
            size_bytes=repeats[0].size_bytes,
            # The median of the ready times can exceed the sum of the medians of forward and backward pass, and
            # `StepCosts` refuses a message that is ready after the backward pass.
            ready_s=min(end_s, statistics.median(message.ready_s for message in repeats)),
            reduce_s=statistics.median(message.reduce_s for message in repeats),
        )
        for repeats in zip(*(measured.messages for measured in costs), strict=True)
    )
    # `StepCosts` also refuses t_a and t_i above t_io, and their medians can exceed the median of t_io.
    for name in ("ahead_s", "caller_s"):
        numbers[name] = min(numbers[name], numbers["io_s"])
    return StepCosts(**numbers, messages=messages, samples=costs[0].samples)
