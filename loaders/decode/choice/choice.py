"""Chooses the decoding backend of an `ImageLoader` from its argument, its state or a trial, the same on all ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.decode.backend import Backend, BackendConfig, Decode
from datasvc.loaders.decode.choice.choose import ON_GPU
from datasvc.loaders.decode.choice.trial import TrialBatch, Trials, try_backends
from datasvc.loaders.ranks.agree import agree, default_store
from datasvc.loaders.ranks.data_ranks import DataRanks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)
# Function that returns batches for a trial.
Draw = Callable[[], Sequence[TrialBatch]]


class DecodeChoice:
    """The decoding backend of one loader.

    Once the backend is chosen, only a restored state changes it, because pixels differ between backends.

    Args:
        requested: backend of the user's `DecodeConfig`.
        candidates: backends that may be used, the result of `plan_candidates`.
        try_in_child: function that tries backends in a child process.
        find_store: function that returns the store of the process group, or None.
    """

    def __init__(
        self,
        requested: Decode,
        candidates: Sequence[Backend],
        *,
        config: BackendConfig,
        ranks: DataRanks,
        try_in_child: Callable[[BackendConfig, Sequence[Backend], Sequence[TrialBatch]], Trials] = try_backends,
        find_store: Callable[[], Store | None] = default_store,
    ) -> None:
        self._requested, self._candidates = requested, candidates
        self._config, self._ranks = config, ranks
        self._try_in_child, self._find_store = try_in_child, find_store
        self._chosen: Backend | None = candidates[0] if len(candidates) == 1 else None
        self._stored: Backend | None = None  # backend of the last state, if this loader may use it
        self._in_state: Backend | None = None  # backend of the last state, usable or not; equal on all ranks
        self._is_agreed = False  # whether all ranks use `_chosen`

    @property
    def backend(self) -> Backend:
        """The chosen backend; before the choice, the most likely one."""
        return self._chosen or self._stored or self._candidates[0]

    @property
    def state(self) -> Backend | None:
        """The backend to store in a loader state; None before the choice."""
        return self._chosen or self._stored

    def restore(self, stored: Backend | None) -> None:
        """Use the backend of a loader state; warn instead if it is not a candidate. None: the state has none."""
        self._in_state = stored
        if stored is None or stored == self._chosen:
            return
        self._is_agreed = False
        # For "auto", Pillow may not be a candidate, but it is always installed, so it can be used.
        if stored in self._candidates or (stored == "pillow" and self._requested == "auto"):
            self._stored = stored
            # `settle` tries a GPU backend before it is chosen, because another machine may have saved the state.
            self._chosen = None if stored in ON_GPU else stored
            return
        _LOG.warning(
            "the state was saved by a loader that decodes with %r; decode=%r uses %r here, so pixels differ from "
            "those of that run by a few levels of 255",
            stored,
            self._requested,
            self.backend,
        )

    def settle(self, draw: Draw, *, question: Mapping[str, Any]) -> Backend:
        """Choose the backend, after a trial if several are possible, and return it.

        Args:
            draw: function that returns batches for a trial.
            question: values that identify this loader among those of the job, equal on all ranks.

        Raises:
            ConfigError: no candidate works, or this machine cannot use the choice of data rank 0.
            DeviceError: the backend of the state does not work here.
            UnavailableError: data rank 0 does not report its choice.
        """
        # Whether ranks agree on a backend depends only on values that are equal on all ranks. Otherwise one rank
        # could wait for others that do not take part.
        has_choice = self._requested in {"auto", "gpu"} and self._config.device_id is not None
        needs_agreement = has_choice and self._ranks.world_size > 1 and not self._is_agreed
        store = self._find_store() if needs_agreement else None
        if store is not None:
            self._chosen = self._agree(draw, question, store)
            self._is_agreed = True
        if self._chosen is None:
            self._chosen = self._choose_alone(draw) if self._stored is None else self._try_stored(self._stored, draw)
        return self._chosen

    def _agree(self, draw: Draw, question: Mapping[str, Any], store: Store) -> Backend:
        """Return the choice of data rank 0."""
        identity = repr(
            [sorted(question.items()), self._requested, self._in_state, self._ranks.world_size, self._config.pixels]
        )
        answer = agree(
            hashlib.sha256(identity.encode()).hexdigest(),
            # Rank 0 reports even a single candidate, because other ranks may have several.
            lambda: self._chosen or self._stored or self._choose_here(draw),
            is_first=self._ranks.rank == 0,
            store=store,
        )
        chosen = parse_backend(answer)
        if chosen not in self._candidates and not (chosen == "pillow" and self._requested == "auto"):
            raise ConfigError(
                f"decode={self._requested!r} is {chosen!r} on data rank 0, and data rank {self._ranks.rank} has only "
                f"{', '.join(map(repr, self._candidates))}: install the same software on all machines, or give all "
                "ranks decode='cpu' or another backend that all have"
            )
        # Rank 0 reports the backend of a state without a trial, so each rank tries it. Any other GPU backend has
        # worked in the trial of rank 0.
        return self._try_stored(chosen, draw) if chosen in ON_GPU and chosen == self._stored else chosen

    def _try_stored(self, stored: Backend, draw: Draw) -> Backend:
        """Return the backend of the state, after a trial here, because another machine may have saved the state."""
        batches = draw()  # none if there is nothing to decode: then no trial is needed
        refused = self._try_in_child(self._config, [stored], batches).refused if batches else {}
        if refused:
            other = next(backend for backend in ON_GPU if backend != stored)
            raise DeviceError(
                f"the state was saved by a loader that decodes with {stored!r}, which does not work here: "
                f"{refused[stored]}; to continue with pixels that differ by a few levels of 255 give decode='cpu' or "
                f"decode={other!r}"
            )
        return stored

    def _choose_alone(self, draw: Draw) -> Backend:
        if self._ranks.world_size > 1:
            _LOG.warning(
                "each of %d ranks chooses a backend for decode=%r alone, because torch.distributed has no process "
                "group: pixels may differ after a resume; give all ranks the same backend, decode='cpu' or another",
                self._ranks.world_size,
                self._requested,
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
            if self._requested == "gpu":
                reasons = "; ".join(f"{backend}: {reason}" for backend, reason in trials.refused.items())
                raise ConfigError(f"no backend for decode='gpu' works on this machine: {reasons}; use decode='cpu'")
            return self._candidates[0]  # for "auto", a backend on the CPU
        chosen = max(trials.rates, key=trials.rates.__getitem__)  # of equal rates, that of the first candidate
        measured = ", ".join(f"{rate:.0f} images/s with {backend!r}" for backend, rate in trials.rates.items())
        _LOG.info("decode=%r is %r here: %s", self._requested, chosen, measured)
        return chosen


def parse_backend(value: object) -> Backend:
    """Return the backend that a loader's state names. Raises ConfigError: there is no backend of that name."""
    for backend in get_args(Backend):
        if value == backend:
            parsed: Backend = backend
            return parsed
    raise ConfigError(f"decode of a loader's state is {value!r}; expected one of {', '.join(get_args(Backend))}")
