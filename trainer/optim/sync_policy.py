"""When ranks average or hand over their weights, and to whom: pure functions of the number of steps.

The names are those of the papers: local SGD (Stich 2019), post-local and hierarchical SGD (Lin et al. 2020), EASGD
in its synchronous form (Zhang et al. 2015), DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (Douillard et al.
2025), D-PSGD (Lian et al. 2017), here "gossip", with the parts of Ako (Watcharapichat et al. 2016), and LTFB (Jacobs
et al. 2019), here "tournament".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal, get_args

Kind = Literal["local", "hierarchical", "easgd", "diloco", "gossip", "tournament"]
Graph = Literal["ring", "exponential"]
# Not "signsgd": its votes have no size, and an outer step has the size of the outer gradient.
_Codec = Literal["int8", "int4", "onebit", "ternary", "qsgd"]

_FORMS: Final = (
    "local:STEPS, postlocal:STEPS:STEPS, hierarchical:STEPS,STEPS, easgd:STEPS:BETA, "
    "diloco:STEPS[:fragments=N,delay=D,alpha=A,codec=C], gossip:ring or gossip:exponential, with :STEPS or "
    ":STEPS:fragments=N, or tournament:STEPS[:samples=M,perturb=F]"
)
_OPTIONS: Final[Mapping[str, Mapping[str, Callable[[str], Any]]]] = {
    "diloco": {"fragments": int, "delay": int, "alpha": float, "codec": str},
    "gossip": {"fragments": int},
    "tournament": {"samples": int, "perturb": float},
}


@dataclass(frozen=True)
class SyncPolicy:
    """When and how ranks average.

    Attributes:
        kind: what a round does.
        steps: steps between two rounds of a parameter.
        warmup_steps: number of first steps of which each is a round.
        node_steps: steps of a round among the ranks of a node; None: there are no such rounds.
        beta: of "easgd", the share of the mean of the ranks in the new center.
        graph: of "gossip", who averages with whom.
        fragments: of "diloco" and "gossip", number of parts of the parameters. A round averages one of them; they
            take turns.
        delay: of "diloco", steps between the start of a round, in which a rank sends, and its end, in which its
            weights change.
        alpha: of "diloco", the share of the rank's own weights in its weights after a round, as in the paper.
        codec: of "diloco", how outer gradients are sent, see `gradients.quantized`; None: as they are.
        samples: of "tournament", largest number of samples that a judge should use. The training program does.
        perturb: of "tournament", the factor by which learning rates differ; 1: they do not.
    """

    kind: Kind
    steps: int
    warmup_steps: int = 0
    node_steps: int | None = None
    beta: float = 0.9
    graph: Graph = "ring"
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    codec: str | None = None
    samples: int = 256
    perturb: float = 1.0

    @property
    def round_steps(self) -> int:
        """Steps between two rounds, of whichever fragment."""
        return self.steps // self.fragments

    @property
    def gives_equal_weights(self) -> bool:
        """Whether all ranks have the same weights after a round."""
        return self.kind not in ("easgd", "gossip", "tournament") and self.fragments == 1 and self.alpha == 0

    def is_round(self, step: int) -> bool:
        """Return whether all ranks average after this step; steps count from 1."""
        return step <= self.warmup_steps or (step - self.warmup_steps) % self.round_steps == 0

    def round_at(self, step: int) -> range:
        """Return the round of all ranks that the step after this number of steps belongs to.

        Its `start` is the number of steps before the round, its `stop` that after it.
        """
        if step < self.warmup_steps:
            return range(step, step + 1)
        start = step - (step - self.warmup_steps) % self.round_steps
        return range(start, start + self.round_steps)

    def starts_round(self, step: int) -> bool:
        """Return whether the round that ends `delay` steps later starts after this step."""
        return self.is_round(step + self.delay)

    def last_round(self, step: int) -> int:
        """Return the number, from 0, of the last round that has started after this step; without warm-up steps."""
        return (step + self.delay) // self.round_steps - 1

    def is_node_round(self, step: int) -> bool:
        """Return whether only the ranks of a node average after this step."""
        return self.node_steps is not None and step % self.node_steps == 0 and not self.is_round(step)


def parse_sync(text: str) -> SyncPolicy:
    """Return the policy that a text describes, such as "local:8".

    Raises:
        ValueError: the text has another form, or a number is out of range.
    """
    kind, *parts = text.split(":")
    try:
        match kind, parts:
            case "local", [steps]:
                return _checked(SyncPolicy("local", int(steps)))
            case "postlocal", [warmup, steps]:
                return _checked(SyncPolicy("local", int(steps), warmup_steps=int(warmup)))
            case "hierarchical", [periods]:
                of_node, of_all = map(int, periods.split(","))
                return _checked(SyncPolicy("hierarchical", of_all, node_steps=of_node))
            case "easgd", [steps, beta]:
                return _checked(SyncPolicy("easgd", int(steps), beta=float(beta)))
            case ("diloco" | "tournament") as named, [steps, *options] if len(options) < 2:
                return _checked(SyncPolicy(named, int(steps), **_read_options(_OPTIONS[named], *options)))
            case "gossip", [("ring" | "exponential") as graph, *given] if len(given) < 3:
                steps, *options = given or ["1"]
                read = _read_options(_OPTIONS["gossip"], *options)
                return _checked(SyncPolicy("gossip", int(steps), graph=graph, **read))
    except ValueError:
        pass  # a text that is not a number gets the same message
    raise ValueError(
        f"sync is {text!r}; expected {_FORMS}. STEPS is at least 1, those of a node divide those of all ranks, "
        "0 < BETA < 1, N divides STEPS, 0 <= D < STEPS / N, 0 <= A <= 1, M is at least 1, F >= 1, and C is one of "
        f"{', '.join(get_args(_Codec))}"
    )


def _read_options(kinds: Mapping[str, Callable[[str], Any]], text: str | None = None) -> dict[str, Any]:
    pairs = [] if text is None else [pair.partition("=") for pair in text.split(",")]
    if any(name not in kinds for name, _, _ in pairs) or len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError
    return {name: kinds[name](value) for name, _, value in pairs}


def _checked(policy: SyncPolicy) -> SyncPolicy:
    assert policy.kind in get_args(Kind)
    node_steps = policy.node_steps
    are_valid = policy.steps >= 1 and policy.warmup_steps >= 0 and 0 < policy.beta < 1
    if not are_valid or (node_steps is not None and (node_steps < 1 or policy.steps % node_steps)):
        raise ValueError
    if policy.fragments < 1 or policy.steps % policy.fragments or policy.codec not in (None, *get_args(_Codec)):
        raise ValueError
    # A round ends before the next one starts, so one fragment at most is in flight.
    if not 0 <= policy.delay < policy.round_steps or not 0 <= policy.alpha <= 1:
        raise ValueError
    if policy.samples < 1 or not 1 <= policy.perturb < math.inf:
        raise ValueError
    return policy


def cut_fragments(sizes: Sequence[int], num_fragments: int) -> list[range]:
    """Cut parameters into fragments of about equal size, in order; return their positions.

    Each cut is the one nearest to an equal share, so it is off by at most half of the largest parameter, unless a
    fragment would be empty.

    Args:
        sizes: numbers of elements of the parameters.
        num_fragments: number of fragments.

    Raises:
        ValueError: there are more fragments than parameters.
    """
    if num_fragments > max(len(sizes), 1):
        raise ValueError(f"{len(sizes)} trainable parameters cannot have {num_fragments} fragments; use fewer")
    ends, cuts = [0, *accumulate(sizes)], [0]
    for number in range(1, num_fragments):
        goal = ends[-1] * number / num_fragments
        candidates = range(cuts[-1] + 1, len(sizes) - num_fragments + number + 1)
        cuts.append(min(candidates, key=lambda position: abs(ends[position] - goal)))
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


def neighbours(graph: Graph, num_ranks: int, rank: int, round_number: int) -> list[int]:
    """Return the ranks to which a rank sends its weights in a round, ascending.

    Each rank takes the mean of what it receives and of its own weights, which keeps the mean of all ranks. In a ring
    a rank sends to both neighbours; in the exponential graph to the rank 2^k further, for k from 0 in turns, as long
    as 2^k is below the number of ranks.

    Args:
        graph: the graph.
        num_ranks: number of ranks.
        rank: a rank.
        round_number: number of the round, from 0.
    """
    if num_ranks == 1:
        return []
    if graph == "ring":
        return sorted({(rank - 1) % num_ranks, (rank + 1) % num_ranks})
    return [(rank + (1 << (round_number % (num_ranks - 1).bit_length()))) % num_ranks]
