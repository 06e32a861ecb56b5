"""Loaders that are created without `ranks=` in a program of many processes."""

import os
import subprocess
import sys
import types
from functools import partial

import pytest
import torch.distributed as dist
import torch.utils.data
from torch.testing._internal.distributed.fake_pg import FakeStore

import datasvc
from datasvc.errors import ConfigError
from datasvc.loaders import DataRanks, ImageLoader, Mixture, TokenLoader
from datasvc.loaders.ranks.data_ranks import choose_data_ranks
from datasvc.loaders.torch import Dataset, IterableDataset, OrderBatchSampler, ResumableDataLoader
from datasvc.testing import small_dataset
from tests.loaders.tokens.test_token_loader import schema_of, write_split

SAMPLES, BATCH = 24, 4
# What a program writes that has forgotten the ranks; each rank prints the positions that it trains on.
PROGRAM = """
import sys
import datasvc
from datasvc.loaders import ImageLoader
{init}
with ImageLoader(datasvc.open(sys.argv[1]).dataset("pets@1")["train"], batch_size=4, training=True, size=8) as loader:
    positions = [number for batch in loader for number in batch.positions.tolist()]
print(f"positions {{positions}}", flush=True)
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("ranks") / "repo")
    small_dataset(url, "pets", samples=SAMPLES)
    return datasvc.open(url)


@pytest.fixture
def group():
    """Initialise torch.distributed as rank 1 of 2, with a back end that needs no second process."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def write_blocks(repository):
    return write_split(repository, [{"tokens": [number] * 8} for number in range(SAMPLES)], schema_of())


def make_loaders(repo):
    """Return functions that create loaders of all kinds, without ranks."""
    split = repo.dataset("pets@1")["train"]
    dataset = Dataset(split, columns=["key", "label"])
    return {
        "images": partial(ImageLoader, split, batch_size=BATCH, training=True, size=8),
        "evaluation": partial(ImageLoader, split, batch_size=BATCH, training=False, size=8),
        "mixture": partial(ImageLoader, Mixture({split: 1}), batch_size=BATCH, training=True, size=8),
        "tokens": partial(TokenLoader, write_blocks(repo.repository), batch_size=1, training=True),
        "sampler": lambda: OrderBatchSampler(split, batch_size=BATCH).order,
        "iterable": lambda: IterableDataset(dataset, OrderBatchSampler(dataset, batch_size=BATCH)).order,
    }


KINDS = ["images", "evaluation", "mixture", "tokens", "sampler", "iterable"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_without_ranks_has_the_rank_of_the_process_group(repo, group, kind):
    """coqui-ai/Trainer#144, Smith42/astroPT#64: every device is given the same samples, and no message tells so."""
    assert make_loaders(repo)[kind]().ranks == DataRanks(1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "2", "RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"HOROVOD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_a_loader_without_ranks_is_refused_where_a_launcher_started_several_processes(
    repo, monkeypatch, kind, environ
):
    """Lightning-AI/pytorch-lightning#15734: a data module asks for its rank before there is a process group."""
    make = make_loaders(repo)[kind]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"=2, so this is one of 2 processes.*init\(\).*ranks=DataRanks\(\) if"):
        make()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "8",
            "ENVIRONMENT": "BATCH",
        },  # the batch script, which srun did not start
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # a shell of salloc
        {"WORLD_SIZE": ""},
    ],
)
def test_a_process_that_is_alone_reads_all_samples(environ):
    assert choose_data_ranks(None, environ) == DataRanks(0, 1)


def test_explicit_ranks_are_taken_as_they_are(repo, group, monkeypatch):
    """mosaicml/streaming#597: tensor-parallel peers need the same samples, so the rank of the process is wrong."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    split = repo.dataset("pets@1")["train"]
    for ranks in (DataRanks(), DataRanks(0, 3)):
        assert ImageLoader(split, batch_size=2, training=False, size=8, ranks=ranks).ranks == ranks
        assert OrderBatchSampler(split, batch_size=2, ranks=ranks).order.ranks == ranks


def fake_horovod():
    return types.SimpleNamespace(is_initialized=lambda: True, rank=lambda: 2, size=lambda: 3)


def fake_jax():
    distributed = types.SimpleNamespace(is_initialized=lambda: True)
    return types.SimpleNamespace(distributed=distributed, process_index=lambda: 2, process_count=lambda: 3)


def fake_ray_train():
    context = types.SimpleNamespace(get_world_rank=lambda: 2, get_world_size=lambda: 3)
    return types.SimpleNamespace(get_context=lambda: context)


@pytest.mark.parametrize(
    ("name", "module"), [("horovod.torch", fake_horovod), ("jax", fake_jax), ("ray.train", fake_ray_train)]
)
def test_the_groups_of_other_frameworks_count_too(monkeypatch, name, module):
    """EleutherAI/oslo#59 and others: the framework has ranks, and the loader is not told of them."""
    monkeypatch.setitem(sys.modules, name, module())
    assert choose_data_ranks(None, {}) == DataRanks(2, 3)


def test_a_loader_that_was_created_before_the_group_is_refused_at_its_first_batch(repo, request):
    """Lightning-AI/pytorch-lightning#15734: the loader is created before the trainer starts the ranks."""
    loaders = make_loaders(repo)
    split = Dataset(repo.dataset("pets@1")["train"], columns=["key"])
    sampler = OrderBatchSampler(split, batch_size=BATCH)
    early = [
        loaders["images"](),
        loaders["tokens"](),
        ResumableDataLoader(split, sampler),
        torch.utils.data.DataLoader(split, batch_sampler=sampler),
        torch.utils.data.DataLoader(IterableDataset(split, sampler), batch_size=BATCH),
    ]
    explicit = ImageLoader(split.split, batch_size=BATCH, training=True, size=8, ranks=DataRanks())
    request.getfixturevalue("group")
    for loader in early:
        with pytest.raises(
            ConfigError, match=r"created as data rank 0 of 1.*now.* rank 1 of 2; create the loader after"
        ):
            next(iter(loader))
    assert len(next(iter(explicit)).positions) == BATCH


def test_a_manager_of_a_rank_without_a_process_group_warns_that_each_rank_saves_alone(repo, monkeypatch, caplog):
    """bytedance/ibot#15, speechbrain/speechbrain#2132: all processes write checkpoints, where one should."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with repo.models.manager("cnn") as manager:
        manager.save({"w": 1}, step=1)
    (warning,) = caplog.messages
    assert "WORLD_SIZE=2" in warning
    assert "saves alone" in warning
    assert repo.models.restore("cnn@1").state["w"] == 1


@pytest.mark.parametrize("kind", ["sampler", "iterable", "loader"])
def test_accelerate_does_not_divide_a_rank_s_part_again(repo, kind):
    """huggingface/accelerate#4199, #4075, #3520: a loader that has its rank is divided a second time."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    dataset = Dataset(repo.dataset("pets@1")["train"], columns=["key"])

    def make(ranks):
        batches = OrderBatchSampler(dataset, batch_size=2, ranks=ranks)
        if kind == "sampler":
            return torch.utils.data.DataLoader(dataset, batch_sampler=batches)
        if kind == "iterable":
            return torch.utils.data.DataLoader(IterableDataset(dataset, batches), batch_size=2)
        return ResumableDataLoader(dataset, batches)

    prepare = partial(data_loader.prepare_data_loader, num_processes=2, process_index=0)
    if kind == "loader":
        import accelerate

        with pytest.raises(ConfigError, match=r"leave it out of prepare, and move its batches"):
            accelerate.Accelerator(cpu=True).prepare(make(None))
        return
    with pytest.raises(ConfigError, match=r"rank 0 of 2, and accelerator.prepare would divide .* again"):
        prepare(make(DataRanks(0, 2)))
    # A loader of all samples is divided once, by Accelerate.
    parts = [
        [
            key
            for batch in prepare(make(DataRanks()), process_index=index, put_on_device=False)
            for key in batch["key"]
        ]
        for index in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(repo.dataset("pets@1")["train"].to_arrow(["key"])["key"].to_pylist())


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "datasvc-run"])
def test_two_ranks_of_a_program_that_gives_no_ranks_train_on_all_samples_once(repo, tmp_path, launcher):
    """coqui-ai/Trainer#144: two devices, one set of samples; here with real ranks of two launchers."""
    init = {
        "torchrun": "import torch.distributed\ntorch.distributed.init_process_group('gloo')",
        "datasvc-run": "import datasvc.trainer as hvd\nhvd.init()",
    }[launcher]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(init=init))
    command = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "datasvc-run": ["datasvc.trainer.launch", "-np", "2", sys.executable],
    }[launcher]
    url = repo.repository.url.removeprefix("file://")
    done = subprocess.run(
        [sys.executable, "-m", *command, program, url],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("positions ")[2] for line in done.stdout.splitlines() if "positions [" in line]
    assert len(lines) == 2, done.stdout
    positions = [int(number) for line in lines for number in line.strip("[]").split(",")]
    assert sorted(positions) == list(range(SAMPLES))
