"""Ray with our data and versions, on a real cluster of one node whose workers are killed."""

import os
import signal
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError
from datasvc.order import AccessOrder, OrderConfig
from datasvc.testing import small_dataset
from tests.support.ray_cluster import ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
NUM_SAMPLES, BATCH, NUM_STEPS = 48, 8, 10


@pytest.fixture(scope="module")
def ray():
    with ray_cluster() as ray:
        yield ray


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("ray") / "repo")
    small_dataset(url, "pets", samples=NUM_SAMPLES, shard_bytes=8_000)
    return datasvc.open(url)


def kill_once(marker):
    """End this process by SIGKILL, unless a process did before."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def keys_in_order(split, order, epoch=0):
    shards, rows = AccessOrder(split.table.samples_per_shard, order, epoch).locate(range(len(split)))
    starts = np.cumsum([0, *split.table.samples_per_shard])
    keys = split.to_arrow(columns=["key"])["key"].to_pylist()
    return [keys[starts[shard] + row] for shard, row in zip(shards, rows, strict=True)]


@pytest.fixture
def ordered(ray):
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True
    yield
    options.preserve_order = False


@pytest.mark.parametrize("order", [None, OrderConfig(seed=3), OrderConfig(1, "windowed", lanes=2, block=4)])
def test_ray_data_reads_a_split_in_its_order_though_a_worker_is_killed(ray, ordered, repo, tmp_path, order):
    from datasvc.integrations.ray_data import SplitDatasource

    split, marker = repo.dataset("pets@1")["train"], str(tmp_path / "killed")
    assert split.table.num_shards > 2
    source = SplitDatasource(split, columns=["key", "image", "label"], order=order, epoch=2)

    def kill(batch):
        kill_once(marker)
        return batch

    found = ray.data.read_datasource(source, override_num_blocks=4).map_batches(kill, batch_format="pyarrow")
    rows = found.take_all()
    assert os.path.exists(marker)
    expected = keys_in_order(split, order or OrderConfig(shuffle=None), 2)
    assert [row["key"] for row in rows] == expected
    images = {sample["key"]: (sample["image"], sample["label"]) for sample in split}
    assert all((row["image"], row["label"]) == images[row["key"]] for row in rows)


def test_an_epoch_continues_at_a_position_and_samples_come_through_the_cache(ray, ordered, repo, tmp_path):
    from datasvc.cache import Cache
    from datasvc.integrations.ray_data import SplitDatasource

    with Cache(tmp_path / "cache", budget="100MB") as cache:
        assert cache.status().resident_bytes == 0
    split, order = repo.dataset("pets@1")["train"], OrderConfig(seed=5)
    source = SplitDatasource(split, columns=["key"], order=order, start=13, cache=tmp_path / "cache")
    rows = ray.data.read_datasource(source, override_num_blocks=3).take_all()
    assert [row["key"] for row in rows] == keys_in_order(split, order)[13:]
    with Cache(tmp_path / "cache") as cache:
        assert cache.status().resident_bytes > 0
    assert ray.data.read_datasource(SplitDatasource(split, columns=["key"], start=len(split))).take_all() == []


def test_tasks_have_whole_shards_without_an_order_and_wrong_arguments_are_refused(ray, repo):
    from datasvc.integrations.ray_data import SplitDatasource

    split = repo.dataset("pets@1")["train"]
    counts = split.table.samples_per_shard.tolist()
    assert [task.metadata.num_rows for task in SplitDatasource(split).get_read_tasks(1000)] == counts
    assert sum(task.metadata.num_rows for task in SplitDatasource(split).get_read_tasks(2)) == NUM_SAMPLES
    for wrong in ({"start": NUM_SAMPLES + 1}, {"start": -1}, {"epoch": -1}):
        with pytest.raises(ConfigError, match="expected"):
            SplitDatasource(split, **wrong)


def loss_of(net, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(net(images.flatten(1)), labels % 4)


def train_with_ray_train(config):
    """Train on two workers, one of which is killed once if there is a `marker`."""
    import ray.train

    from datasvc.integrations.ray_train import WorkerVersions, ranks
    from datasvc.loaders import ImageLoader

    repo = datasvc.open(config["url"])
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 * 8 * 8, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    split = repo.dataset("pets@1")["train"]
    with (
        ImageLoader(split, batch_size=BATCH // 2, training=True, size=8) as loader,
        ImageLoader(split, batch_size=BATCH // 2, training=False, size=8) as evaluation,
        WorkerVersions(repo, config["name"], loader=loader, every=2, report_every=3) as versions,
    ):
        assert loader.ranks == evaluation.ranks == ranks()
        step, state = versions.restore()
        if state is not None:
            net.module.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
        while step < NUM_STEPS:
            for batch in loader:
                # An evaluation over a part of the samples, which is the same in each step.
                assert next(iter(evaluation)).positions[0] == ranks().rank * (BATCH // 2)
                loss = loss_of(net, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                state = {"net": net.module.state_dict(), "optimizer": optimizer.state_dict()}
                versions.report(state, step=step, metrics={"loss": loss}, is_last=step == NUM_STEPS)
                if step == 7 and config.get("marker") and ray.train.get_context().get_world_rank() == 1:
                    kill_once(config["marker"])
                if step == NUM_STEPS:
                    break


def fit(ray, repo, name, folder, **config):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        train_with_ray_train,
        train_loop_config={"url": repo.repository.url, "name": name, **config},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    ).fit()


def test_ray_train_continues_at_the_version_of_its_checkpoint_when_a_worker_is_killed(ray, repo, tmp_path):
    from datasvc.integrations.ray_train import version_of

    whole = fit(ray, repo, "whole", tmp_path)
    result = fit(ray, repo, "killed", tmp_path, marker=str(tmp_path / "marker"))
    assert (tmp_path / "marker").exists()
    assert version_of(repo, whole.checkpoint) == str(repo.models.versions("whole")[-1])
    found = repo.models.restore(version_of(repo, result.checkpoint))
    expected = repo.models.restore("whole")
    assert found.entry["step"] == result.metrics["step"] == NUM_STEPS
    assert [found.state["net"][name].tolist() for name in ("weight", "bias")] == [
        expected.state["net"][name].tolist() for name in ("weight", "bias")
    ]
    keys = repo.dataset("pets@1")["train"].to_arrow(columns=["key"])["key"].to_pylist()
    uses = repo.models.trained_on([str(found.version)], keys=keys).all_uses()
    served = sorted((use.epoch, use.position) for use in uses)
    assert served == [(number // NUM_SAMPLES, number % NUM_SAMPLES) for number in range(NUM_STEPS * BATCH)]


@pytest.mark.parametrize("rank", [0, 1])
def test_ray_train_gets_a_report_every_so_many_steps_and_of_each_save(tmp_path, monkeypatch, rank):
    import ray.train

    from datasvc.integrations.ray_train import WorkerVersions

    reports, repo = [], datasvc.open(str(tmp_path / "repo"), create=True)
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "report", lambda metrics, checkpoint=None: reports.append((metrics, checkpoint)))

    def train(steps, **options):
        reports.clear()
        with WorkerVersions(repo, "net", **options) as versions:
            assert versions.restore()[0] == steps[0]
            for step in steps[1:]:
                versions.report({"net": torch.zeros(2)}, step=step, metrics={"loss": 0.5}, is_last=step == steps[-1])
        return [metrics["step"] for metrics, _ in reports]

    assert train([0, 1, 2, 3, 4, 5, 6, 7, 8], every=5, report_every=3) == [3, 5, 6, 8]
    assert reports[0][0] == {"loss": 0.5, "step": 3}
    assert (reports[-1][1] is None) == (rank == 1)
    # From step 8 on; a step in which a report was due may be left out.
    assert train([8, 9, 13, 14, 16, 25, 26], every=100, report_every=10) == [13, 25, 26]
    for wrong in (0, True, 1.5, "10min"):
        with pytest.raises(ConfigError, match="expected a number of steps, at least 1"):
            WorkerVersions(repo, "net", report_every=wrong)


def train_with_hvd(url, name, marker=None):
    """Train from the newest version, as rank of a `RayExecutor`; rank 1 is killed once after step 5."""
    import datasvc.trainer as hvd

    hvd.init()
    repo = datasvc.open(url)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(net.parameters()), named_parameters=net.named_parameters())
    with repo.models.manager(name) as model:
        found, step = model.restore(default=None), 0
        if found is not None:
            step = found.entry["step"]
            net.load_state_dict(found.state["net"])
            optimizer.load_state_dict(found.state["optimizer"])
        while step < NUM_STEPS:
            step += 1
            optimizer.zero_grad()
            net(torch.full((1, 4), float(step + hvd.rank()))).square().sum().backward()
            optimizer.step()
            model.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, step=step, wait=True)
            if step == 5 and marker is not None and hvd.rank() == 1:
                kill_once(marker)
    placement = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    hvd.shutdown()
    return placement


class Counter:
    def __init__(self, start, *, step=1):
        self.count, self.step = start, step

    def add(self):
        self.count += self.step
        return self.count


def test_the_executor_calls_functions_on_all_ranks_and_starts_again_after_a_lost_one(ray, repo, tmp_path):
    from datasvc.integrations.ray_executor import RayExecutor

    url, marker = repo.repository.url, str(tmp_path / "marker")
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start(Counter, [10], {"step": 2}, extra_env_vars={"OF_A_TEST": "yes"})
    assert executor.execute(lambda counter: counter.add()) == [12, 12]
    assert executor.execute_single(lambda counter: counter.add()) == 14
    assert executor.execute(lambda counter: (counter.count, os.environ["OF_A_TEST"])) == [(14, "yes"), (12, "yes")]
    assert executor.run(train_with_hvd, [url, "hvd-whole"]) == [(0, 2, 0, 2), (1, 2, 1, 2)]
    # Ranks that live on meet again.
    assert executor.run(train_with_hvd, kwargs={"url": url, "name": "hvd-whole"})[1] == (1, 2, 1, 2)
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
        executor.run(train_with_hvd, [url, "hvd-killed", marker])
    executor.shutdown()
    assert repo.models.restore("hvd-killed").entry["step"] == 5
    executor.start()
    references = executor.run_remote(train_with_hvd, [url, "hvd-killed", marker])
    assert [placement[0] for placement in ray.get(references)] == [0, 1]
    executor.shutdown()
    whole, found = (repo.models.restore(name) for name in ("hvd-whole", "hvd-killed"))
    assert found.entry["step"] == whole.entry["step"] == NUM_STEPS
    assert torch.equal(found.state["net"]["weight"], whole.state["net"]["weight"])


def test_an_executor_without_resources_or_with_contradicting_arguments_says_what_to_do(ray):
    from datasvc.integrations.ray_executor import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=50)
    with pytest.raises(ConfigError, match=r"no resources for 50 ranks .* start fewer ranks, or more nodes"):
        executor.start()
    with pytest.raises(ConfigError, match="call start first"):
        executor.run(print)
    for wrong in (
        {},
        {"num_workers": 1, "num_hosts": 1},
        {"num_workers": 0},
        {"num_workers": 1, "gpus_per_worker": 1},
    ):
        with pytest.raises(ConfigError):
            RayExecutor(**wrong)
    executor = RayExecutor(num_hosts=1, num_workers_per_host=2)
    executor.start()
    with pytest.raises(ConfigError, match="call shutdown first"):
        executor.start()
    assert executor.run(int, ["7"]) == [7, 7]
    executor.shutdown()
