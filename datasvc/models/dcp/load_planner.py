"""`DcpLoadPlanner`, torch's default planner for loads, with all differences in one error instead of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from datasvc.errors import ConfigError
from datasvc.models.restoring.fit import TensorSpec, plan_load
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.repository.store.redaction import redact_url


@dataclass(frozen=True)
class _ValueSpec(TensorSpec):
    """A value that is not a tensor, in a table of differences."""

    def __str__(self) -> str:
        return "a value"


_VALUE = _ValueSpec("value", ())


class DcpLoadPlanner(DefaultLoadPlanner):
    """Plan loads as torch's default planner does; if the state does not fit the checkpoint, list all differences.

    Create one for each load, on every rank: `dcp.load(state, storage_reader=reader, planner=DcpLoadPlanner())`. It
    takes the arguments of `DefaultLoadPlanner`, and works with the checkpoints of any storage reader.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan the load of this rank.

        Raises:
            ConfigError: the checkpoint lacks a key of the state, or has a tensor of another shape. The message has a
                table of the differences. Nothing was loaded.
        """
        try:
            return super().create_local_plan()
        # torch raises these for the first key that does not fit. Other errors of these classes have no differences.
        except (RuntimeError, ValueError, KeyError) as error:
            table = self._differences()
            if table is None:
                raise
            raise ConfigError(table) from error

    def _differences(self) -> str | None:
        """Return a message with all differences between the state and the checkpoint; None if there are none."""
        assert self.metadata is not None, "torch sets the planner up before it plans"
        stored = self.metadata.state_dict_metadata
        found = {key: _spec_of_stored(value) for key, value in stored.items()}
        expected = {key: _spec_of(value, found.get(key)) for key, value in self.state_dict.items()}
        if self.allow_partial_load:
            expected = {key: spec for key, spec in expected.items() if key in found}
        # Keys of the checkpoint that the state lacks are no error for torch. They are listed, because a key that is
        # missing may be there under another name.
        report = plan_load(expected, found)
        if not (report.missing or report.mismatched):
            return None
        title = redact_url(getattr(self.metadata.storage_meta, "reference", None) or "the checkpoint")
        return (
            f"{title} does not fit the state to load, nothing was loaded: {report}\n"
            "load into the state of the same model, rename its keys, or leave keys out with allow_partial_load=True"
        )


def _spec_of_stored(stored: Any) -> TensorSpec:
    if isinstance(stored, TensorStorageMetadata):
        return TensorSpec(str(stored.properties.dtype).removeprefix("torch."), tuple(stored.size))
    return _VALUE


def _spec_of(value: Any, found: TensorSpec | None) -> TensorSpec:
    """Return the dtype and shape of a value of the state; `found` is that of the checkpoint's value, None without."""
    if not isinstance(value, torch.Tensor):
        return _VALUE
    # torch converts dtypes while it loads, so they are no difference.
    dtype = dtype_name(value) if found is None or found is _VALUE else found.dtype
    return TensorSpec(dtype, tuple(value.shape))
