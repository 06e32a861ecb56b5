"""Several ranks of torch.distributed.checkpoint, played one after the other in one process by torch's planners."""

import pickle

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from datasvc.models.dcp import DcpWriter


class Block(torch.Tensor):
    """A rank's block of a tensor, in the protocol by which DTensor talks to planners."""

    @staticmethod
    def of(whole, box):
        start, shape = box
        index = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        block = whole[index].as_subclass(Block)
        block.box, block.whole = (torch.Size(start), torch.Size(shape)), torch.Size(whole.shape)
        return block

    def size(self, *dimension):
        return self.whole if hasattr(self, "whole") and not dimension else super().size(*dimension)

    def __create_write_items__(self, fqn, _object):
        data = TensorWriteData(ChunkStorageMetadata(*self.box), TensorProperties(dtype=self.dtype), self.whole)
        return [WriteItem(MetadataIndex(fqn, self.box[0]), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(*self.box)]

    def __get_tensor_shard__(self, _index):
        return self.as_subclass(torch.Tensor)


def save_as_ranks(url, states, **options):
    """What torch's `save` does, with all ranks in this process; `url`: one, or one for each. Returns the writers."""
    urls = [url] * len(states) if isinstance(url, str) else url
    writers = [DcpWriter(each, **options) for each in urls]
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = pickle.loads(pickle.dumps(writers[0].prepare_global_plan(plans)))
    results = [
        pickle.loads(pickle.dumps(writer.write_data(planner.finish_plan(plan), planner).value()))
        for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    return writers, results


def load_as_ranks(readers, states, make_planner=DefaultLoadPlanner):
    planners = [make_planner() for _ in states]
    plans = []
    for rank, (reader, planner, state) in enumerate(zip(readers, planners, states, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()


def rows(whole, rank, num_ranks):
    start, stop = rank * len(whole) // num_ranks, (rank + 1) * len(whole) // num_ranks
    return Block.of(whole, ((start, *[0] * (whole.dim() - 1)), (stop - start, *whole.shape[1:])))
