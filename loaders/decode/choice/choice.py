"""Chooses the decoding backend of an `ImageLoader`: from its argument, its state or a trial.

All ranks get the same backend.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.augment.augment import parse_choice
from datasvc.loaders.decode.backend import Backend, BackendConfig, Decode
from datasvc.loaders.decode.choice.choose import ON_GPU
from datasvc.loaders.decode.choice.trial import TrialBatch, Trials, try_backends
from datasvc.loaders.ranks.data_ranks import DataRanks, agree, default_store
from datasvc.threads import count_processors

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_LOG = logging.getLogger(__name__)
# Function that returns batches for a trial.
DrawBatches = Callable[[], Sequence[TrialBatch]]


# Variables of torchrun and datasvc-run, of horovodrun, and of Open MPI. The first that is set is used.
_LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class DecodeChoice:
    """The decoding backend of one loader.

    Once the backend is chosen, only a restored state changes it, because pixels differ between backends.

    Args:
        requested: backend of the user's `DecodeConfig`.
        candidates: backends that may be used, the result of `plan_candidates`.
        config: settings of the backends.
        ranks: data rank of this process.
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
        self._from_state: Backend | None = None  # backend of the last restored state; equal on all ranks
        self._usable_from_state: Backend | None = None  # the last one that this loader may use
        self._is_agreed = False  # whether all ranks use `_chosen`

    @property
    def backend(self) -> Backend:
        """The chosen backend; before the choice, the most likely one."""
        return self._chosen or self._usable_from_state or self._candidates[0]

    @property
    def state(self) -> Backend | None:
        """The backend to store in a loader state; None before the choice."""
        return self._chosen or self._usable_from_state

    def restore(self, backend: Backend | None) -> None:
        """Use the backend of a loader state, or warn if it may not be used. None: the state has no backend."""
        self._from_state = backend
        if backend is None or backend == self._chosen:
            return
        self._is_agreed = False
        # For "auto", Pillow may not be a candidate, but it is always installed, so it can be used.
        if backend in self._candidates or (backend == "pillow" and self._requested == "auto"):
            self._usable_from_state = backend
            # `settle` tries a GPU backend before it is chosen, because another machine may have saved the state.
            self._chosen = None if backend in ON_GPU else backend
            return
        _LOG.warning(
            "the state was saved by a loader that decodes with %r, which decode=%r does not allow here; this loader "
            "decodes with %r, so its pixels differ from those of the saved run by a few levels of 255",
            backend,
            self._requested,
            self.backend,
        )

    def settle(self, draw_batches: DrawBatches, *, loader_identity: Mapping[str, Any]) -> Backend:
        """Choose the backend and return it. If several are possible, try them first.

        Args:
            draw_batches: function that returns batches for a trial.
            loader_identity: values that identify this loader among those of the job, equal on all ranks.

        Raises:
            ConfigError: no candidate works, or this machine cannot use the choice of data rank 0.
            DeviceError: the backend of the state does not work here.
            UnavailableError: data rank 0 does not report its choice.
        """
        # Decide whether to call `_agree` only from values that are equal on all ranks. Otherwise one rank could wait
        # for others that do not take part.
        has_choice = self._requested in {"auto", "gpu"} and self._config.device_id is not None
        needs_agreement = has_choice and self._ranks.world_size > 1 and not self._is_agreed
        store = self._find_store() if needs_agreement else None
        if store is not None:
            self._chosen = self._agree(draw_batches, loader_identity, store)
            self._is_agreed = True
        if self._chosen is None:
            if self._usable_from_state is None:
                self._chosen = self._choose_without_agreement(draw_batches)
            else:
                self._chosen = self._try_restored(self._usable_from_state, draw_batches)
        return self._chosen

    def _agree(self, draw_batches: DrawBatches, loader_identity: Mapping[str, Any], store: Store) -> Backend:
        """Return the choice of data rank 0."""
        world_size, pixels = self._ranks.world_size, self._config.pixels
        identity = repr([sorted(loader_identity.items()), self._requested, self._from_state, world_size, pixels])
        answer = agree(
            hashlib.sha256(identity.encode()).hexdigest(),
            # Rank 0 reports even a single candidate, because other ranks may have several.
            lambda: self._chosen or self._usable_from_state or self._choose_by_trial(draw_batches),
            is_first=self._ranks.rank == 0,
            store=store,
        )
        chosen = parse_backend(answer)
        if chosen not in self._candidates and not (chosen == "pillow" and self._requested == "auto"):
            raise ConfigError(
                f"for decode={self._requested!r}, data rank 0 chose {chosen!r}, but data rank {self._ranks.rank} can "
                f"use only {', '.join(map(repr, self._candidates))}: install the same software on all machines, or "
                "give all ranks decode='cpu' or another backend that all have"
            )
        # Rank 0 has not tried a backend that it took from the state, so each rank tries it here. A GPU backend that
        # is not from the state has worked in the trial of rank 0.
        is_untried = chosen in ON_GPU and chosen == self._usable_from_state
        return self._try_restored(chosen, draw_batches) if is_untried else chosen

    def _try_restored(self, backend: Backend, draw_batches: DrawBatches) -> Backend:
        """Try the backend of the state, and return it if it works here: another machine may have saved the state."""
        batches = draw_batches()  # none if there is nothing to decode: then no trial is needed
        refused = self._try_in_child(self._config, [backend], batches).refused if batches else {}
        if refused:
            other = next(other for other in ON_GPU if other != backend)
            raise DeviceError(
                f"the state was saved by a loader that decodes with {backend!r}, which does not work here: "
                f"{refused[backend]}; to continue with pixels that differ by a few levels of 255, give "
                f"decode='cpu' or decode={other!r}"
            )
        return backend

    def _choose_without_agreement(self, draw_batches: DrawBatches) -> Backend:
        if self._ranks.world_size > 1:
            _LOG.warning(
                "each of %d ranks chooses a backend for decode=%r alone, because torch.distributed has no process "
                "group: pixels may differ after a resume; give all ranks the same backend, decode='cpu' or another",
                self._ranks.world_size,
                self._requested,
            )
        return self._choose_by_trial(draw_batches)

    def _choose_by_trial(self, draw_batches: DrawBatches) -> Backend:
        """Return the fastest candidate that works on this machine."""
        batches = draw_batches()
        if not batches:
            return self._candidates[0]  # there is nothing to decode
        trials = self._try_in_child(self._config, self._candidates, batches)
        for backend, reason in trials.refused.items():
            _LOG.warning("decode=%r cannot be used on this machine: %s", backend, reason)
        if not trials.rates:
            if self._requested == "gpu":
                reasons = "; ".join(f"{backend}: {reason}" for backend, reason in trials.refused.items())
                raise ConfigError(f"no backend for decode='gpu' works on this machine: {reasons}; use decode='cpu'")
            return self._candidates[0]  # for "auto", the first candidate decodes on the CPU
        chosen = max(trials.rates, key=trials.rates.__getitem__)  # if rates are equal, the first candidate wins
        measured = ", ".join(f"{rate:.0f} images/s with {backend!r}" for backend, rate in trials.rates.items())
        _LOG.info("decode=%r is %r here: %s", self._requested, chosen, measured)
        return chosen


def parse_backend(value: object) -> Backend:
    """Return the backend that a loader's state names. Raises ConfigError: there is no backend of that name."""
    backend: Backend = parse_choice(value, get_args(Backend), "decode of a loader's state")
    return backend


# It is the default number of decoding threads.


def count_rank_processors(environ: Mapping[str, str] = os.environ) -> int:
    """Return this rank's part of the processors, at least 1; all of them without a launcher.

    The ranks of a node may share its processors; without the division, each rank would start a thread per processor.

    Raises:
        ConfigError: the launcher's variable for the number of ranks on this node is not a positive integer.
    """
    name = next((name for name in _LOCAL_SIZES if environ.get(name)), None)
    if name is None:
        return count_processors()
    value = environ[name]
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}; expected the number of ranks on this node: correct it, or unset it")
    return max(1, count_processors() // int(value))
