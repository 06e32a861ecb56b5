"""What a rank says to others before it stores, by a channel that answers as they would."""

import pytest
import torch

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.queue import SaveHandle, SaveTask
from datasvc.models.saving.rank_channel import RankChannel
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.saving.writer import VersionWriter
from datasvc.models.versions.metadata import VersionMetadata


class OtherRank(RankChannel):
    """A second rank that has reached the save of `step`; keeps what it is told."""

    size = 2

    def __init__(self, step):
        self.step, self.told = step, []

    def exchange(self, message):
        self.told.append(message)
        return [message, [None, self.step]]


def save(channel, repository, tensor, step):
    content, copies = FlatState({}, {"w": tensor}, None, {}), HostCopies({"w": tensor}, 0, ())
    task = SaveTask(SaveHandle(step), VersionMetadata(step), content, copies, HostBuffer(), HostBuffer(), 0.0)
    VersionWriter(repository, "m", "delta", channel).write(task)


def test_ranks_that_fell_out_of_step_do_not_mix_two_states(repository):
    with pytest.raises(ConfigError, match=r"different steps; by rank: \[7, 8\]"):
        save(OtherRank(8), repository, torch.ones(3), 7)


def test_a_tensor_whose_bytes_cannot_be_compared_is_told_before_the_others_compare_theirs(repository):
    other = OtherRank(7)
    with pytest.raises(DatasvcError, match="rank 0: "):
        save(other, repository, torch.ones(3, device="meta"), 7)
    ((error, step),) = other.told
    assert (step, bool(error["message"])) == (7, True)
