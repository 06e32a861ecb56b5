"""Hierarchical allreduces beside flat ones: four ranks, as two nodes of two. Trains too if argv[1] is "training"."""

import contextlib
import logging
import os
import sys
import zlib

import torch
from checking import run_checks

import datasvc.trainer as hvd
from datasvc.trainer.engine.execution.transport import GroupTransport
from datasvc.trainer.env.environment import RankPlacement, placement_variables, read_placement
from datasvc.trainer.job import runtime

WORLD = read_placement(os.environ)
RANK, SIZE = WORLD.rank, WORLD.size
assert SIZE == 4
ADJACENT, ALTERNATING, UNEVEN, ONE = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 0)
FLAT, HIERARCHICAL = hvd.EngineSettings(), hvd.EngineSettings(hierarchical_allreduce=True)
# Half precision is rounded at other places: once in a node, and once for each node after the first.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LENGTHS = (0, 1, 1002, 2**17 + 1)

begun = []  # the hierarchical allreduces of the current job
begin = GroupTransport.begin_hierarchical_allreduce


def begin_and_count(self, tensor, scratch):
    begun.append(tensor)
    return begin(self, tensor, scratch)


GroupTransport.begin_hierarchical_allreduce = begin_and_count


@contextlib.contextmanager
def job(settings, nodes=ADJACENT):
    """Join a job as a rank of one of these nodes, and leave it."""
    node = nodes[RANK]
    local_rank = nodes[:RANK].count(node)
    place = RankPlacement(RANK, SIZE, local_rank, nodes.count(node), node, len(set(nodes)))
    os.environ.update(placement_variables(place))
    hvd.init(settings=settings)
    yield
    hvd.shutdown()


def count(settings, nodes, run):
    """Return what `run` returns in a job, and the number of hierarchical allreduces in it."""
    begun.clear()
    with job(settings, nodes):
        return run(), len(begun)


def compare_bits(tensors):
    """Fail unless all ranks have the same bits."""
    sums = hvd.allgather_object([zlib.crc32(tensor.view(torch.uint8).numpy()) for tensor in tensors])
    assert sums.count(sums[0]) == SIZE, sums


def reduce_all():
    """Reduce odd and even lengths of all floating dtypes, alone, together and grouped, with factors."""
    torch.manual_seed(RANK)
    results = []
    for dtype in TOLERANCES:
        # No cancellation: the tolerances are relative.
        tensors = [torch.rand(length).to(dtype) + 1 for length in LENGTHS]
        handles = [
            hvd.allreduce_async(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0) for tensor in tensors
        ]
        handles += [hvd.allreduce_async(tensor, op=hvd.Average) for tensor in tensors]
        results += [hvd.synchronize(handle) for handle in handles]
        results += hvd.grouped_allreduce(tensors, op=hvd.Sum)
        in_place = tensors[-1].clone()
        hvd.allreduce_(in_place, op=hvd.Sum)
        results.append(in_place)
    compare_bits(results)
    return results


def check_results_are_those_of_flat_allreduces_with_equal_bits_on_all_ranks():
    expected, number = count(FLAT, ADJACENT, reduce_all)
    assert number == 0
    for nodes in (ADJACENT, ALTERNATING):
        found, number = count(HIERARCHICAL, nodes, reduce_all)
        assert number >= 3 * len(TOLERANCES)
        for ours, flat in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, flat, rtol=TOLERANCES[flat.dtype], atol=0)


def train():
    """Train with gradients that are sent as float32, float16 and bfloat16; return the parameters."""
    trained = []
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(31, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression
        )
        torch.manual_seed(RANK)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 31)).square().mean().backward()
            optimizer.step()
        trained += [parameter.detach() for parameter in model.parameters()]
    compare_bits(trained)
    return trained


def check_gradients_are_combined_as_by_flat_allreduces_compressed_or_not():
    if "training" not in sys.argv:
        return  # torch takes seconds to load what optimizers need
    expected, _ = count(FLAT, ADJACENT, train)
    found, number = count(HIERARCHICAL, ADJACENT, train)
    assert number == 9
    plain = len(expected) // 3
    torch.testing.assert_close(found[:plain], expected[:plain], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[plain:], expected[plain:], rtol=0, atol=1e-3)


def check_other_operations_and_sets_stay_flat():
    def run():
        some = hvd.add_process_set([0, 3])
        if some.included():
            assert hvd.allreduce(torch.tensor([float(RANK)]), process_set=some).item() == 1.5
        assert hvd.allreduce(torch.tensor([RANK]), op=hvd.Sum).item() == 6
        assert hvd.allreduce(torch.tensor([RANK + 1.0]), op=hvd.Max).item() == 4
        assert hvd.allreduce(torch.tensor([RANK + 1.0]), op=hvd.Product).item() == 24
        hvd.allreduce(torch.ones(3), op=hvd.Adasum)
        assert hvd.reducescatter(torch.ones(2), op=hvd.Sum).tolist() == ([4.0] if RANK < 2 else [])

    assert count(HIERARCHICAL, ADJACENT, run)[1] == 0


def check_a_rank_without_data_stands_aside():
    def run():
        if RANK:
            assert hvd.allreduce(torch.tensor([1.0, 2.0, 3.0]), op=hvd.Sum).tolist() == [3.0, 6.0, 9.0]
        hvd.join()

    assert count(HIERARCHICAL, ADJACENT, run)[1] == 1


def check_nodes_that_do_not_allow_it_reduce_flat_and_one_line_has_the_reason():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("datasvc.trainer").addHandler(handler)
    for nodes, words in ((UNEVEN, "some nodes have 1 ranks and others 3"), (ONE, "all ranks are on one node")):
        result, number = count(HIERARCHICAL, nodes, lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())
        assert (result, number) == ([4.0] * 3, 0)
        if RANK == 0:
            assert [line for line in lines if "not hierarchical, but flat" in line and words in line] == lines
            assert len(lines) == 1
        lines.clear()
    logging.getLogger("datasvc.trainer").removeHandler(handler)


def check_autotune_tries_it_unless_it_is_set():
    def tries():
        hvd.allreduce(torch.ones(2))
        engine = runtime.current_job().engine
        return engine._tuner._autotuner._tries_hierarchical if RANK == 0 else None

    for setting, expected in ((None, True), (False, False), (True, False)):
        settings = hvd.EngineSettings(autotune=True, hierarchical_allreduce=setting)
        (found, number) = count(settings, ADJACENT, tries)
        assert found == (expected if RANK == 0 else None)
        assert number == (setting is True)


run_checks(globals())
