"""What happens to a save after the training goes on: wait for the copies, store, commit, remember."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from datasvc.errors import NotFoundError
from datasvc.models.saving.distributed_save import save_distributed
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.queue import SaveHandle
from datasvc.models.saving.rank_channel import RankChannel
from datasvc.models.saving.staging_buffer import HostCopies
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.tensors.write import Codec
from datasvc.models.versions.commit import StoredState, base_records, commit
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Repository, Resolved

if TYPE_CHECKING:
    import torch


class VersionWriter:
    """Writes the versions of one model, one after the other, from the thread that saves.

    Args:
        repository: where to.
        name: of the model.
        codec: see `store_tensors`.
        channel: between the ranks, for this thread alone.

    Attributes:
        newest: version that it committed last, or that was restored since; None: none.
    """

    def __init__(self, repository: Repository, name: str, codec: Codec, channel: RankChannel) -> None:
        self._repository = repository
        self._name = name
        self._codec: Codec = codec
        self._channel = channel
        self._records: tuple[str, Sequence[TensorRecord]] = ("", ())
        # Copies that the save before wrote: the training may be overwriting them, which `store_pieces` sees.
        self._held: Mapping[str, torch.Tensor] = {}
        self._trusts_base = True
        self.newest: Resolved | None = None

    def write(
        self,
        content: FlatState,
        copy: Callable[[], HostCopies],
        about: VersionMetadata,
        handle: SaveHandle,
        on_copied: Callable[[float], None],
        began_s: float,
    ) -> Resolved:
        """Store and commit; every rank calls this, and gets the same version or the same error.

        Args:
            content: what to save, of which names and skeletons count.
            copy: returns its tensors, or raises why there are none.
            about: what is said of it.
            handle: of the save.
            on_copied: is told the seconds that a device copied.
            began_s: when it was asked for, by `time.perf_counter`.

        Raises:
            DatasvcError: see `save_distributed`.
        """
        copies: list[HostCopies] = []

        def prepare() -> FlatState:
            copies.append(copy())
            device_s = copies[0].wait()
            handle.stall_s += device_s
            on_copied(device_s)
            return content.with_tensors(copies[0].tensors)

        trusts_base, self._trusts_base = self._trusts_base, False
        version = save_distributed(
            self._channel,
            self._repository.objects,
            prepare,
            lambda stored: self._commit(stored, about, handle, began_s),
            step=about.step,
            # After a failure in full: should the version before lack objects, whoever builds on it fails for ever.
            base=lambda: self._base(about) if self._codec == "delta" and trusts_base else (),
            held=self._held,
            codec=self._codec,
        )
        self._trusts_base = True
        self._held = copies[0].tensors
        self.newest = version
        return version

    def forget_copies(self) -> None:
        """Let go of the copies of the last save."""
        self._held = {}

    def _parent(self, about: VersionMetadata) -> str | None:
        return about.parent or (None if self.newest is None else str(self.newest))

    def _base(self, about: VersionMetadata) -> Sequence[TensorRecord]:
        """Return the tensors that those of the save are stored as differences to."""
        parent = self._parent(about)
        # Remembered records may name objects that went with their version: as long as it is there, they are.
        if parent is not None and self._records[0] == parent and self._is_there(parent):
            return self._records[1]
        self._records = ("", ())
        return base_records(self._repository, self._name, parent)

    def _is_there(self, version: str) -> bool:
        try:
            self._repository.resolve("models", version)
        except NotFoundError:
            return False
        return True

    def _commit(self, stored: StoredState, about: VersionMetadata, handle: SaveHandle, began_s: float) -> Resolved:
        duration = {"stall_s": handle.stall_s, "total_s": time.perf_counter() - began_s}
        version = commit(
            self._repository,
            self._name,
            stored,
            replace(about, parent=self._parent(about)),
            extra={"duration": {name: round(seconds, 6) for name, seconds in duration.items()}},
        )
        self._records = (str(version), stored.records)
        return version
