"""Which backend a loader settles on, and what its state has to do with it. Trials are replaced by their outcome."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.decode.choice.choice import DecodeChoice, parse_backend
from datasvc.loaders.decode.choice.trial import TrialBatch, Trials
from datasvc.loaders.ranks.data_ranks import DataRanks
from tests.loaders.decode.photos import config, windows

ALL = ["cpu", "gpu-window", "gpu-whole"]
GPU = ["gpu-window", "gpu-whole"]


class Machine:
    """Where the backends have these rates; without one they are refused."""

    def __init__(self, **rates):
        self.rates = {name.replace("_", "-"): rate for name, rate in rates.items()}
        self.tried = []

    def __call__(self, _config, candidates, batches):
        assert batches
        self.tried.append(list(candidates))
        trials = Trials()
        for each in candidates:
            if each in self.rates:
                trials.rates[each] = self.rates[each]
            else:
                trials.refused[each] = "it ended its process with SIGSEGV"
        return trials


def draw():
    return [TrialBatch([b"image"], windows(1))]


def make(machine, wanted="auto", candidates=ALL, rank=0, world_size=1, store=None, device_id=0):
    return DecodeChoice(
        wanted,
        candidates,
        config=replace(config(), device_id=device_id),
        ranks=DataRanks(rank, world_size),
        try_in_child=machine,
        find_store=lambda: store,
    )


def settle(choice, **identity):
    return choice.settle(draw, loader_identity={"version": "0f3a", "position": 0} | identity)


def test_the_fastest_of_what_works_is_chosen_once_and_is_in_the_state_from_then_on(caplog):
    machine = Machine(cpu=900, gpu_whole=2500)
    choice = make(machine)
    assert (choice.backend, choice.state) == ("cpu", None)
    with caplog.at_level(logging.INFO):
        assert settle(choice) == settle(choice) == choice.backend == choice.state == "gpu-whole"
    assert machine.tried == [ALL]
    assert "decode='gpu-window' cannot be used on this machine: it ended its process with SIGSEGV" in caplog.text
    assert "decode='auto' is 'gpu-whole' here: 900 images/s with 'cpu', 2500 images/s with 'gpu-whole'" in caplog.text


def test_of_equally_fast_backends_the_first_candidate_is_chosen():
    assert settle(make(Machine(cpu=900, gpu_whole=900))) == "cpu"


@pytest.mark.parametrize("wanted", ["cpu", "gpu-window", "gpu-whole", "pillow"])
def test_what_was_asked_for_by_name_is_used_untried(wanted):
    machine = Machine()
    choice = make(machine, wanted, [wanted])
    assert settle(choice) == choice.state == wanted
    assert machine.tried == []


def test_where_nothing_works_auto_is_the_cpu_and_gpu_is_refused_with_all_reasons():
    assert settle(make(Machine())) == "cpu"
    with pytest.raises(ConfigError, match=r"gpu-window: it ended .*SIGSEGV; gpu-whole: it ended .* use decode='cpu'"):
        settle(make(Machine(), "gpu", GPU))


def test_without_a_sample_there_is_nothing_to_try():
    choice = make(Machine())
    assert choice.settle(list, loader_identity={}) == "cpu"


def test_a_run_resumes_with_the_backend_of_its_state_though_another_is_faster_now():
    machine = Machine(cpu=900, gpu_window=400, gpu_whole=2500)
    choice = make(machine)
    choice.restore("gpu-window")
    assert choice.state == "gpu-window"
    assert settle(choice) == "gpu-window"
    assert machine.tried == [["gpu-window"]]  # not on this machine yet
    choice.restore("cpu")
    assert settle(choice) == choice.state == "cpu"
    choice.restore(None)  # of before backends were kept
    assert settle(choice) == "cpu"
    assert machine.tried == [["gpu-window"]]


def test_loading_its_own_state_again_tries_nothing():
    machine = Machine(cpu=1, gpu_window=2)
    choice = make(machine)
    settle(choice)
    choice.restore(choice.state)
    settle(choice)
    assert len(machine.tried) == 1


def test_a_backend_of_a_state_that_does_not_work_here_is_an_error_that_names_the_others():
    choice = make(Machine(cpu=900, gpu_whole=2500))
    choice.restore("gpu-window")
    with pytest.raises(DeviceError, match=r"'gpu-window', .* SIGSEGV; .* decode='cpu' or decode='gpu-whole'"):
        settle(choice)


@pytest.mark.parametrize(
    ("wanted", "candidates", "stored", "expected"),
    [
        ("auto", ["cpu"], "gpu-window", "cpu"),  # a machine without a GPU
        ("auto", ["pillow"], "cpu", "pillow"),
        ("cpu", ["cpu"], "pillow", "cpu"),
        ("gpu-whole", ["gpu-whole"], "gpu-window", "gpu-whole"),
    ],
)
def test_where_the_backend_of_a_state_cannot_be_had_the_run_goes_on_and_says_that_pixels_differ(
    caplog, wanted, candidates, stored, expected
):
    choice = make(Machine(), wanted, candidates)
    choice.restore(stored)
    assert settle(choice) == choice.state == expected
    assert f"decodes with {stored!r}, which decode={wanted!r} does not allow here; this loader" in caplog.text
    assert f"decodes with {expected!r}, so its pixels differ" in caplog.text


def test_pillow_of_a_state_is_used_where_auto_would_be_the_cpu(caplog):
    choice = make(Machine(), "auto", ["cpu"])
    choice.restore("pillow")
    assert settle(choice) == "pillow"
    assert not caplog.text


def test_data_rank_0_tries_and_chooses_for_all_ranks_and_their_peers():
    """On the second machine another backend would be faster."""
    store = HashStore()
    machines = [Machine(cpu=900, gpu_whole=2500), Machine(cpu=900, gpu_window=2500)]
    places = [(machines[1], 1), (machines[1], 1), (machines[0], 0), (machines[0], 0)]
    choices = [make(machine, rank=rank, world_size=2, store=store) for machine, rank in places]
    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(settle, choices)) == ["gpu-whole"] * 4
    assert [machine.tried for machine in machines] == [[ALL], []]


@pytest.mark.parametrize("stored", [None, "cpu", "gpu-whole"])
def test_data_rank_0_answers_though_it_has_nothing_to_choose(stored):
    """As it has no DALI, or a state that says what decodes."""
    store = HashStore()
    first = make(Machine(), candidates=["cpu"], world_size=2, store=store)
    other = make(Machine(cpu=900, gpu_whole=2500), rank=1, world_size=2, store=store)
    for choice in (first, other):
        choice.restore(stored)
    assert [settle(first), settle(other)] == ["cpu", "cpu"]


def test_a_stored_backend_of_rank_0_is_the_answer_and_each_rank_tries_it_by_itself():
    store = HashStore()
    machines = [Machine(cpu=900, gpu_window=400), Machine(cpu=900, gpu_window=400)]
    choices = [make(machine, rank=rank, world_size=2, store=store) for rank, machine in enumerate(machines)]
    for choice in choices:
        choice.restore("gpu-window")
    assert [settle(choice) for choice in choices] == ["gpu-window"] * 2
    assert [machine.tried for machine in machines] == [[["gpu-window"]]] * 2
    for choice in choices:
        choice.restore("cpu")  # another question, though the run stands where it stood
    assert [settle(choice) for choice in choices] == ["cpu"] * 2


@pytest.mark.parametrize(("wanted", "rank_0", "rank_1"), [("auto", ALL, ["cpu"]), ("gpu", GPU, ["gpu-window"])])
def test_a_rank_that_cannot_use_what_rank_0_has_chosen_says_so(wanted, rank_0, rank_1):
    store = HashStore()
    assert settle(make(Machine(gpu_whole=1), wanted, rank_0, world_size=2, store=store)) == "gpu-whole"
    other = make(Machine(), wanted, rank_1, rank=1, world_size=2, store=store)
    with pytest.raises(
        ConfigError, match=r"data rank 0 chose 'gpu-whole', but data rank 1 can use only '(cpu|gpu-window)'"
    ):
        settle(other)


@pytest.mark.parametrize(("wanted", "device_id"), [("auto", None), ("cpu", 0)])
def test_nobody_is_asked_where_no_gpu_or_a_named_backend_decodes(wanted, device_id):
    choice = make(Machine(), wanted, ["cpu"], rank=1, world_size=2, store=HashStore(), device_id=device_id)
    assert settle(choice) == "cpu"  # without a store, whose rank 0 would never answer


def test_ranks_of_no_process_group_choose_alone_and_say_so(caplog):
    assert settle(make(Machine(cpu=1), rank=1, world_size=2)) == "cpu"
    assert "each of 2 ranks chooses a backend" in caplog.text


def test_what_is_no_backend_is_no_state():
    assert parse_backend("gpu-whole") == "gpu-whole"
    for value in ("gpu", None, ["cpu"]):
        with pytest.raises(ConfigError, match="decode of a loader's state"):
            parse_backend(value)
