"""Elastic states in a world of one: save, restore, commit, notices of hosts, and the loop around a training."""

import contextlib
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import datasvc.trainer as hvd
from datasvc.loaders import DataRanks
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.choice.choice import DecodeChoice
from datasvc.loaders.decode.choice.trial import Trials
from datasvc.trainer.elastic import (
    ElasticLoader,
    ElasticSampler,
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    StateHandler,
    TorchState,
    get_handler_registry,
    run_loop,
    set_handler_registry,
)
from datasvc.trainer.env.environment import RankPlacement
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.messages import RankAssignment
from datasvc.trainer.rendezvous.rendezvous import RoundStore
from tests.support.pages import find_page


@pytest.fixture(autouse=True)
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


def train_a_step(state):
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 3)).sum().backward()
    state.optimizer.step()


def new_state(**values):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TorchState(model, hvd.DistributedOptimizer(sgd), **values)


def copied(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_restore_undoes_everything_since_the_last_commit():
    state = new_state(step=0, losses=[])
    train_a_step(state)
    state.step, state.losses = 1, [0.5]
    state.commit()
    weights, momentum = copied(state.model), state.optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    train_a_step(state)
    state.step = 2
    state.losses.append(0.25)
    state.restore()
    torch.testing.assert_close(copied(state.model), weights, rtol=0, atol=0)
    torch.testing.assert_close(state.optimizer.state_dict()["state"][0]["momentum_buffer"], momentum, rtol=0, atol=0)
    assert (state.step, state.losses) == (1, [0.5])


def test_a_restore_forgets_gradients_that_were_under_way():
    state = new_state()
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 3)).sum().backward()
    state.restore()
    train_a_step(state)


def test_a_restore_may_be_repeated():
    state = new_state(losses=[])
    for _ in range(2):
        state.losses.append(1.0)
        train_a_step(state)
        state.restore()
        assert state.losses == []


def test_whatever_has_a_state_dict_is_restored_by_it():
    state = new_state()
    state = TorchState(state.model, state.optimizer, schedule=torch.optim.lr_scheduler.StepLR(state.optimizer, 1))
    state.commit()
    train_a_step(state)
    state.schedule.step()
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    state.restore()
    assert state.schedule.last_epoch == 0
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("undo", [TorchState.restore, TorchState.on_reset])
def test_a_loss_scaler_forgets_a_step_that_was_under_way(undo):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, scaler=torch.amp.GradScaler("cpu"), off=torch.amp.GradScaler(enabled=False))

    def backward():
        optimizer.zero_grad()
        state.scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        state.scaler.unscale_(optimizer)

    backward()
    undo(state)
    backward()
    assert torch.equal(model.weight.grad, torch.ones(1, 3))


def test_a_value_that_is_replaced_is_what_is_saved_from_then_on():
    state = new_state()
    other = nn.Linear(3, 1)
    state.model = other
    weights = copied(other)
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other
    torch.testing.assert_close(copied(other), weights, rtol=0, atol=0)


def test_values_may_be_none_and_models_may_be_missing():
    state = TorchState(best=None)
    state.best = 3
    state.restore()
    assert state.best is None
    assert state.model is None


def test_an_own_handler_takes_an_own_kind_of_value():
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            self.save()

    before = get_handler_registry()
    set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        state = TorchState(counter=Counter())
    finally:
        set_handler_registry(before)
    state.counter.count = 1
    state.commit()
    state.counter.count = 2
    state.restore()
    assert state.counter.count == 1


def test_a_death_in_the_middle_of_a_sync_leaves_the_last_commit_whole():
    class Dying(StateHandler):
        def save(self):
            pass

        def restore(self):
            pass

        def sync(self):
            raise hvd.HorovodInternalError("rank 1 is gone")

    before = get_handler_registry()
    set_handler_registry([*before, (Failing, Dying)])
    try:
        state = new_state(step=0, dying=Failing())
    finally:
        set_handler_registry(before)
    state.commit()
    weights = copied(state.model)
    train_a_step(state)
    state.step = 1
    with pytest.raises(hvd.HorovodInternalError):
        state.synchronize()
    state.restore()
    torch.testing.assert_close(copied(state.model), weights, rtol=0, atol=0)
    assert (state.step, state.serial) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "skips"),
    [
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ],
)
def test_a_change_of_hosts_interrupts_once_and_skips_the_sync_if_ranks_only_left(changes, skips):
    state = ObjectState(step=0)
    for number, change in enumerate(changes, 1):
        state.on_hosts_updated(number, change)
    state.step = 5
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skips
    state.commit()
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.commit()
    state.restore()
    assert state.step == 5


def test_a_change_that_was_reported_before_does_not_count_again():
    state = ObjectState()
    state.on_hosts_updated(2, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_hosts_updated(2, HostUpdateResult.added)
    state.on_hosts_updated(3, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync


def test_states_of_old_scripts_take_their_own_broadcast_and_rank():
    state = ObjectState(bcast_object=lambda _: {"a": 7}, get_rank=lambda: 1, a=1)
    state.sync()
    assert state.a == 7
    state.restore()
    assert state.a == 7
    assert state._host_messages.empty()
    assert state._last_updated_timestamp == 0


def test_serials_grow_with_commits_and_syncs():
    state = ObjectState(a=1)
    assert state.serial == 0
    state.synchronize()
    state.commit()
    assert state.serial == 2


class Failing(State):
    """Counts what the loop does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")

    def reset(self):
        self.calls.append("reset")


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (hvd.HorovodInternalError("lost"), ["sync", "restore", "reset", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=False), ["sync", "reset", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=True), ["sync", "reset"]),
    ],
)
def test_the_loop_calls_the_function_again_after(error, calls):
    state, results = Failing(), iter([error, 42])
    state.register_reset_callbacks([lambda: state.calls.append("callback")])

    @hvd.elastic.run
    def train(state, factor, *, offset):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return factor * result + offset

    assert train(state, 2, offset=1) == 85
    calls.insert(calls.index("reset") + 1, "callback")
    assert state.calls == calls
    assert train.__name__ == "train"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (hvd.HorovodInternalError("lost in between"), ["sync", "restore", "reset", "restore", "reset", "sync"]),
        (HostsUpdatedInterrupt(skip_sync=True), ["sync", "restore", "reset", "reset", "sync"]),
    ],
)
def test_a_rank_that_is_lost_while_the_state_adapts_to_a_round_leads_to_the_next_round(error, calls):
    state, failures, in_callback = Failing(), iter([hvd.HorovodInternalError("lost")]), iter([error])

    def adapt():
        for each in in_callback:
            raise each

    state.register_reset_callbacks([adapt])

    @hvd.elastic.run
    def train(state):
        for each in failures:
            raise each
        return "done"

    assert train(state) == "done"
    assert state.calls == calls


@pytest.mark.slow
def test_an_error_that_comes_again_and_again_without_a_commit_between_is_raised():
    num_calls = 0

    @hvd.elastic.run
    def train(state):
        nonlocal num_calls
        num_calls += 1
        raise hvd.HorovodInternalError("ranks disagree")

    with pytest.raises(hvd.HorovodInternalError, match="ranks disagree"):
        train(Failing())
    assert num_calls == 5


class Meetings:
    """A rendezvous whose every round follows a death, or none."""

    def __init__(self, *, deaths):
        self.deaths, self.num_rounds, self.reported, self.trained = deaths, 0, [], []

    @property
    def assignment(self):
        self.num_rounds += 1
        return RankAssignment(
            1, RankPlacement(), needs_sync=True, notice=0, num_deaths=self.num_rounds if self.deaths else 0
        )

    def notifying(self, _):
        return contextlib.nullcontext()

    def begin_training(self):
        self.trained.append("begun")

    def end_training(self):
        self.trained.append("ended")

    def repeat_notice(self):
        pass

    def report_error(self, error, *, ends_job):
        self.reported.append((str(error), ends_job))


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [True, False])
def test_losses_of_ranks_are_not_counted_among_errors_that_come_again_and_again(monkeypatch, deaths):
    meetings = Meetings(deaths=deaths)
    monkeypatch.setattr("datasvc.trainer.elastic.run_loop.open_rendezvous", lambda _: meetings)
    errors = iter([hvd.HorovodInternalError("rank 1 left the job")] * 10)

    @hvd.elastic.run
    def train(state):
        for error in errors:
            raise error

    if deaths:
        train(Failing())
        assert not meetings.reported
        assert meetings.trained == ["begun", "ended"]
    else:
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 left"):
            train(Failing())
        assert meetings.reported == [("rank 1 left the job", True)]
        assert meetings.trained == ["begun"]


def test_the_program_on_the_page_continues_when_hosts_change_at_the_last_batch_of_an_epoch():
    page = find_page("elastic.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)[1]
    program, num_replaced = re.subn(r"epoch < \d+", "epoch < 2", program)
    assert num_replaced == 1
    notice = "if batch_number == 59: state.on_hosts_updated(state.epoch + 1, 1)"
    names = {}
    exec(program.replace("state.commit()", f"{notice}\n            state.commit()"), names)
    assert names["state"].epoch == 2


def test_the_loop_does_not_handle_other_errors():
    @hvd.elastic.run
    def train(state):
        raise KeyError("mine")

    state = Failing()
    with pytest.raises(KeyError):
        train(state)
    assert state.calls == ["sync"]


@pytest.fixture
def places(monkeypatch):
    """Sets rank and size as a round would."""

    def be(rank, size):
        monkeypatch.setattr("datasvc.trainer.job.runtime.rank", lambda: rank)
        monkeypatch.setattr("datasvc.trainer.job.runtime.size", lambda: size)

    return be


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_deals_what_is_left_to_those_that_are_left(places, shuffle):
    def share(rank, size, state=None):
        places(rank, size)
        sampler = ElasticSampler(range(24), shuffle=shuffle, seed=3)
        if state is None:
            sampler.set_epoch(2)
        else:
            sampler.load_state_dict(state)
        return sampler

    samplers = [share(rank, 4) for rank in range(4)]
    first = [index for sampler in samplers for index in list(sampler)[:3]]
    assert samplers[0].get_indices(0, 3) == list(samplers[0])[:3]
    samplers[0].record_batch(0, 3)
    state = samplers[0].state_dict()
    assert state == {"epoch": 2, "processed_num": 12}
    rest = [index for rank in range(3) for index in share(rank, 3, state)]
    assert len(share(0, 3, state)) == 4
    assert sorted(first + rest) == list(range(24))
    assert (first + rest == list(range(24))) is False
    assert (sorted(first) == list(range(12))) is not shuffle


def test_a_samplers_ranks_get_equally_many_and_an_ended_epoch_gives_none(places):
    shares = []
    for rank in range(4):
        places(rank, 4)
        shares.append(list(ElasticSampler(range(5), shuffle=False)))
    assert shares == [[0, 4], [1, 0], [2, 1], [3, 2]]
    sampler = ElasticSampler(range(5))
    sampler.record_batch(0, 2)
    sampler.reset()
    assert list(sampler) == []


def test_samples_may_be_recorded_one_by_one(places):
    places(0, 1)
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.record_indices([1, 4])
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == [0, 2, 3, 5]
    sampler.set_epoch(1)
    assert len(sampler) == 6


class Numbers:
    """A loader: numbers 0 to 23 in batches of 12 over all ranks."""

    def __init__(self, rank, size):
        self.rank, self.size, self.position, self.is_closed = rank, size, 0, False

    def __iter__(self):
        while self.position < 24:
            start, self.position = self.position, self.position + 12
            yield list(range(start, start + 12))[self.rank :: self.size]

    def __len__(self):
        return 2

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def close(self):
        self.is_closed = True


def test_a_new_loader_for_a_new_rank_and_size_continues_at_the_position(places):
    places(1, 2)
    loader = ElasticLoader(Numbers)
    state = TorchState(loader=loader, step=0)
    batches = iter(state.loader)
    assert next(batches) == [1, 3, 5, 7, 9, 11]
    state.save()
    assert next(batches)[0] == 13
    old = loader.loader
    places(0, 3)
    state.restore()
    state.on_reset()
    assert old.is_closed
    assert (loader.size, len(loader)) == (3, 2)
    assert list(state.loader) == [[12, 15, 18, 21]]


def test_a_new_loader_of_the_next_round_continues_although_rank_and_size_stay(places):
    places(0, 2)
    state = TorchState(loader=ElasticLoader(Numbers))
    old = state.loader.loader
    next(iter(state.loader))
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    assert old.is_closed
    assert state.loader.loader is not old
    assert list(state.loader) == [[12, 14, 16, 18, 20, 22]]


def test_a_loader_that_cannot_be_made_because_a_rank_is_lost_is_made_in_the_next_round_at_the_same_position(places):
    errors = [None, hvd.HorovodInternalError("lost"), hvd.HorovodInternalError("lost"), None]

    def make_loader(rank, size):
        if error := errors.pop(0):
            raise error
        return Numbers(rank, size)

    places(0, 2)
    state = TorchState(loader=ElasticLoader(make_loader))
    old = state.loader.loader
    next(iter(state.loader))
    places(0, 1)
    with pytest.raises(hvd.HorovodInternalError):
        state.on_reset()
    assert old.is_closed
    assert state.loader.state_dict() == {"position": 12}
    state.restore()  # the last commit
    assert state.loader.state_dict() == {"position": 0}
    with pytest.raises(hvd.HorovodInternalError):
        state.on_reset()
    state.on_reset()
    assert list(state.loader) == [list(range(12)), list(range(12, 24))]


class Choosing(Numbers):
    """A loader with a decoding backend that all ranks choose together, in the store of the round."""

    store = None

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.choice = DecodeChoice(
            "auto",
            ["cpu", "gpu-window"],
            config=BackendConfig(1, 8, "uint8", num_threads=1, prefetch=0, device_id=0),
            ranks=DataRanks(rank, size),
            try_in_child=lambda *_: Trials({"cpu": 2.0, "gpu-window": 1.0}, {}),
            find_store=lambda: self.store,
        )

    def settle(self):
        return self.choice.settle(lambda: ["a batch"], loader_identity={"position": self.position})

    def state_dict(self):
        return super().state_dict() | {"decode": self.choice.state}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.choice.restore(state["decode"])


def test_a_rank_that_is_new_in_a_round_agrees_with_those_that_stay(monkeypatch, places):
    def begin_round(number):
        # A wait in the store of this round fails at once.
        lost = HashStore()
        lost.set("broken", "no answer")
        monkeypatch.setattr(Choosing, "store", RoundStore(lost, prefix="", broken_key="broken", timeout_s=60))

    begin_round(1)
    places(0, 2)
    staying = TorchState(loader=ElasticLoader(Choosing))
    assert staying.loader.settle() == "cpu"
    begin_round(2)
    hvd.shutdown()
    hvd.init()
    staying.on_reset()
    assert staying.loader.settle() == "cpu"
    places(1, 2)
    joining = TorchState(loader=ElasticLoader(Choosing))
    joining.loader.load_state_dict(staying.loader.state_dict())
    assert joining.loader.settle() == "cpu"


def test_a_loader_whose_rank_and_size_stay_is_kept_within_a_round_but_set_back(places):
    places(0, 2)
    state = TorchState(loader=ElasticLoader(Numbers))
    inner = state.loader.loader
    next(iter(state.loader))
    state.restore()
    state.on_reset()
    assert state.loader.loader is inner
    assert inner.position == 0
    with pytest.raises(AttributeError):
        _ = state.loader.nonsense


def test_what_a_failed_training_function_had_is_deleted_before_the_next_round():
    """A process group among it keeps connections, in which other ranks may wait for this one."""
    groups, left = [], []

    class Group:
        def __init__(self):
            self.cycle = self

    def train_step():
        group = Group()
        groups.append(weakref.ref(group))
        raise HorovodInternalError("a rank was lost")

    def reset():
        left.extend(group() for group in groups)

    def train(_state):
        if not left:
            try:
                train_step()
            except HorovodInternalError as error:
                raise HorovodInternalError("explained") from error

    run_loop.run(train, reset)(ObjectState(step=0))
    assert left == [None]
