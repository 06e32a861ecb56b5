"""Background part of a save: waits for the device copies, stores the tensors and commits the version."""

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
    """Writes the versions of one model one after the other, in the save thread.

    Args:
        repository: repository that stores the versions.
        name: name of the model.
        codec: see `store_tensors`.
        channel: channel between the ranks that no other thread uses.

    Attributes:
        newest: version that was committed or restored last; None: none.
    """

    def __init__(self, repository: Repository, name: str, codec: Codec, channel: RankChannel) -> None:
        self._repository = repository
        self._name = name
        self._codec: Codec = codec
        self._channel = channel
        self._records: tuple[str, Sequence[TensorRecord]] = ("", ())
        # Copies that the last save wrote. The training may overwrite them; `store_chunks` checks their digests.
        self._base_tensors: Mapping[str, torch.Tensor] = {}
        self._trusts_base = True
        self.newest: Resolved | None = None

    def write(
        self,
        flat_state: FlatState,
        copy: Callable[[], HostCopies],
        metadata: VersionMetadata,
        handle: SaveHandle,
        on_copied: Callable[[float], None],
        began_s: float,
    ) -> Resolved:
        """Store and commit a state; every rank calls this and gets the same version or the same error.

        Args:
            flat_state: state to save; its names and skeletons are used, its tensors come from `copy`.
            copy: returns the copied tensors, or raises the reason why there are none.
            metadata: metadata of the version.
            handle: handle of the save.
            on_copied: called with the seconds that a device was copying.
            began_s: time of the call, by `time.perf_counter`.

        Raises:
            DatasvcError: see `save_distributed`.
        """
        copies: list[HostCopies] = []

        def prepare() -> FlatState:
            copies.append(copy())
            device_s = copies[0].wait()
            handle.stall_s += device_s
            on_copied(device_s)
            return flat_state.with_tensors(copies[0].tensors)

        # Set again after success only, so that every kind of failure leaves it False.
        trusts_base, self._trusts_base = self._trusts_base, False
        version = save_distributed(
            self._channel,
            self._repository.objects,
            prepare,
            lambda stored: self._commit(stored, metadata, handle, began_s),
            step=metadata.step,
            # After a failure store in full: if the base lacks objects, every save that builds on it would fail too.
            base=lambda: self._base(metadata) if self._codec == "delta" and trusts_base else (),
            base_tensors=self._base_tensors,
            codec=self._codec,
        )
        self._trusts_base = True
        self._base_tensors = copies[0].tensors
        self.newest = version
        return version

    def release_copies(self) -> None:
        """Drop the copies of the last save, so that their memory can be freed."""
        self._base_tensors = {}

    def _parent(self, metadata: VersionMetadata) -> str | None:
        return metadata.parent or (None if self.newest is None else str(self.newest))

    def _base(self, metadata: VersionMetadata) -> Sequence[TensorRecord]:
        """Return the records of the version to which the tensors of this save are stored as differences."""
        parent = self._parent(metadata)
        # Cached records are valid while their version exists: its removal may delete the objects that they name.
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

    def _commit(self, stored: StoredState, metadata: VersionMetadata, handle: SaveHandle, began_s: float) -> Resolved:
        duration = {"stall_s": handle.stall_s, "total_s": time.perf_counter() - began_s}
        version = commit(
            self._repository,
            self._name,
            stored,
            replace(metadata, parent=self._parent(metadata)),
            extra={"duration": {name: round(seconds, 6) for name, seconds in duration.items()}},
        )
        self._records = (str(version), stored.records)
        return version
