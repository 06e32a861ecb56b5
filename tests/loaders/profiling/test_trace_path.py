from pathlib import Path

from datasvc.loaders.profiling.step_times import trace_path


def test_of_several_ranks_each_has_a_trace_of_its_own():
    assert trace_path("/x/trace.json", rank=0, num_ranks=1) == Path("/x/trace.json")
    paths = [trace_path("/x/trace.json", rank=rank, num_ranks=2) for rank in range(2)]
    assert paths == [Path("/x/trace.0.json"), Path("/x/trace.1.json")]
