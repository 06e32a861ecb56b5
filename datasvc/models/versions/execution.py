"""`Execution`: how the ranks of a run computed its steps, as the entry of a version records it.

The axes are those of Langer et al., "Distributed Training of Deep Learning Models: A Taxonomic Perspective" (IEEE
TPDS 2020): what is divided, when updates reach the ranks, who computes them, and how they are exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from datasvc.errors import ConfigError

Parallelism = Literal["none", "data", "model", "hybrid"]
Consistency = Literal["synchronous", "bounded", "asynchronous"]
Topology = Literal["centralised", "decentralised"]
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "parallelism": get_args(Parallelism),
    "consistency": get_args(Consistency),
    "topology": get_args(Topology),
}
# The names of axes are columns of the search, as in `execution.layout.tensor = 2`.
_AXIS: Final = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Execution:
    """How the ranks of a run computed its steps.

    Attributes:
        layout: number of parts into which each axis divides the ranks, by axis, such as {"data": 2, "tensor": 4}.
        parallelism: what is divided: "data", "model" (layers, stages or activations), "hybrid" (both) or "none".
        consistency: "synchronous" if every step uses the updates of all ranks; "bounded" if they may be late by a
            limited number of steps; else "asynchronous".
        topology: "decentralised" if the ranks compute the updates themselves, as with all-reduce; "centralised" if
            a parameter server does.
        communication: how updates are exchanged, such as "all-reduce"; "" if there is one rank.

    Raises:
        ConfigError: a value is not one of those that are listed above.
    """

    layout: Mapping[str, int] = field(default_factory=dict)
    parallelism: Parallelism = "data"
    consistency: Consistency = "synchronous"
    topology: Topology = "decentralised"
    communication: str = "all-reduce"

    def __post_init__(self) -> None:
        for axis, size in self.layout.items():
            if not (isinstance(axis, str) and _AXIS.fullmatch(axis) and type(size) is int and size >= 1):
                raise ConfigError(
                    f"layout has {axis!r}: {size!r}; expected an axis in lower case, and a size of 1 or more"
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        if not isinstance(self.communication, str):
            raise ConfigError(f"communication is {self.communication!r}; expected a text such as 'all-reduce'")

    def to_dict(self) -> dict[str, Any]:
        """Return the field `execution` of an entry."""
        return {**vars(self), "layout": dict(self.layout)}
