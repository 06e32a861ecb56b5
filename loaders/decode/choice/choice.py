"""Which backend a loader decodes with: as asked for, as its state says, or as a trial shows; once for all ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.decode.backend import Backend, DecodeConfig
from datasvc.loaders.decode.choice.agree import agree, default_store
from datasvc.loaders.decode.choice.choose import ON_GPU, Decode, choose_fastest
from datasvc.loaders.decode.choice.trial import TrialBatch, Trials, try_backends

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
Draw = Callable[[], Sequence[TrialBatch]]


class DecodeChoice:
    """The backend of one loader. Once settled it stays, whatever else is faster later: pixels differ between them.

    Args:
        wanted: by the user.
        candidates: of `plan_candidates`.
        config: of the backends.
        ranks: that share the loader's global batches.
        try_in_child: tries backends; `try_backends`.
        find_store: returns the store of the process group, None without one.
    """

    def __init__(
        self,
        wanted: Decode,
        candidates: Sequence[Backend],
        *,
        config: DecodeConfig,
        ranks: DataRanks,
        try_in_child: Callable[[DecodeConfig, Sequence[Backend], Sequence[TrialBatch]], Trials] = try_backends,
        find_store: Callable[[], Store | None] = default_store,
    ) -> None:
        self._wanted, self._candidates = wanted, candidates
        self._config, self._ranks = config, ranks
        self._try_in_child, self._find_store = try_in_child, find_store
        self._settled: Backend | None = candidates[0] if len(candidates) == 1 else None
        self._stored: Backend | None = None
        self._told: Backend | None = None  # by the last state, the same on all ranks
        self._is_agreed = False

    @property
    def backend(self) -> Backend:
        """What decodes; before it is settled, what is likely."""
        return self._settled or self._stored or self._candidates[0]

    @property
    def state(self) -> Backend | None:
        """What a state says of it; None: nothing, as it is not settled."""
        return self._settled or self._stored

    def restore(self, stored: Backend | None) -> None:
        """Decode as a state says from here on, or say why that is not done; None: it says nothing."""
        self._told = stored
        if stored is None or stored == self._settled:
            return
        self._is_agreed = False
        # Without a GPU "auto" is the CPU's decoder, but Pillow is always there.
        if stored in self._candidates or (stored == "pillow" and self._wanted == "auto"):
            self._stored, self._settled = stored, None if stored in ON_GPU else stored
            return
        _LOG.warning(
            "the state was saved by a loader that decodes with %r; decode=%r is %r here, and pixels differ from "
            "those of that run by a few levels of 255",
            stored,
            self._wanted,
            self.backend,
        )

    def settle(self, draw: Draw, *, question: Mapping[str, Any]) -> Backend:
        """Return what decodes, after a trial where there is something to try.

        Args:
            draw: returns batches to try backends on.
            question: what makes this loader another than the rest of the job's, the same on all ranks.

        Raises:
            ConfigError: no candidate works, or this machine cannot use what data rank 0 has chosen.
            DeviceError: what the state says does not work here.
            UnavailableError: data rank 0 does not say what it chose.
        """
        store = self._find_store() if self._is_asked() and not self._is_agreed else None
        if store is not None:
            self._settled, self._is_agreed = self._agree(draw, question, store), True
        if self._settled is None:
            self._settled = self._choose_alone(draw) if self._stored is None else self._prove(self._stored, draw)
        return self._settled

    def _is_asked(self) -> bool:
        """Return whether ranks ask each other: by what is equal on all of them, or some would wait for the rest."""
        is_open = self._wanted in {"auto", "gpu"} and self._config.device_id is not None
        return is_open and self._ranks.world_size > 1

    def _agree(self, draw: Draw, question: Mapping[str, Any], store: Store) -> Backend:
        """Ask data rank 0, which answers though it has nothing to choose: others may have."""
        asked = repr(
            [sorted(question.items()), self._wanted, self._told, self._ranks.world_size, self._config.pixels]
        )
        answer = agree(
            hashlib.sha256(asked.encode()).hexdigest(),
            lambda: self._settled or self._stored or self._choose_here(draw),
            is_first=self._ranks.rank == 0,
            store=store,
        )
        chosen = parse_backend(answer)
        if chosen not in self._candidates and not (chosen == "pillow" and self._wanted == "auto"):
            raise ConfigError(
                f"decode={self._wanted!r} is {chosen!r} on data rank 0, and data rank {self._ranks.rank} has only "
                f"{', '.join(map(repr, self._candidates))}: install the same on all machines, or give all ranks "
                "decode='cpu' or another that all have"
            )
        return self._prove(chosen, draw) if chosen in ON_GPU and chosen == self._stored else chosen

    def _prove(self, stored: Backend, draw: Draw) -> Backend:
        """Try what another machine has chosen: each rank by itself, as there is nothing to choose."""
        batches = draw()
        refused = self._try_in_child(self._config, [stored], batches).refused if batches else {}
        if refused:
            other = next(each for each in ON_GPU if each != stored)
            raise DeviceError(
                f"the state was saved by a loader that decodes with {stored!r}, which does not work here: "
                f"{refused[stored]}; to go on with pixels that differ by a few levels of 255 give decode='cpu' or "
                f"decode={other!r}"
            )
        return stored

    def _choose_alone(self, draw: Draw) -> Backend:
        if self._ranks.world_size > 1:
            _LOG.warning(
                "decode=%r is chosen by each of %d ranks alone, as torch.distributed has no process group: "
                "pixels of a run that resumes may differ; give the same decode='cpu' or another to all ranks",
                self._wanted,
                self._ranks.world_size,
            )
        return self._choose_here(draw)

    def _choose_here(self, draw: Draw) -> Backend:
        batches = draw()
        if not batches:
            return self._candidates[0]  # there is nothing to decode
        trials = self._try_in_child(self._config, self._candidates, batches)
        for backend, reason in trials.refused.items():
            _LOG.warning("decode=%r cannot be used on this machine: %s", backend, reason)
        if not trials.rates:
            if self._wanted == "gpu":
                reasons = "; ".join(f"{backend}: {reason}" for backend, reason in trials.refused.items())
                raise ConfigError(f"decode='gpu' decodes nothing on this machine: {reasons}; use decode='cpu'")
            return self._candidates[0]
        chosen = choose_fastest(trials.rates)
        measured = ", ".join(f"{rate:.0f} images/s with {backend!r}" for backend, rate in trials.rates.items())
        _LOG.info("decode=%r is %r here: %s", self._wanted, chosen, measured)
        return chosen


def parse_backend(value: object) -> Backend:
    """Return a backend by its name. Raises ConfigError: there is none of that name."""
    for backend in get_args(Backend):
        if value == backend:
            found: Backend = backend
            return found
    raise ConfigError(f"decode of a loader's state is {value!r}; expected one of {', '.join(get_args(Backend))}")
