"""Lightning with our loaders and versions, in this process; killed runs are in test_training_programs."""

import signal
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import datasvc
from datasvc.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]


@pytest.fixture
def here():
    from tests.integrations import lightning_net

    return lightning_net


@pytest.mark.parametrize("steps", [3, 5], ids=["middle", "end of an epoch"])
def test_a_checkpoint_file_has_the_position_of_the_training_loader(digits, tmp_path, steps, here):
    whole, path = here.Net(), tmp_path / "file.ckpt"
    num_steps = len(digits["train"]) // 256
    assert num_steps == 5
    here.trainer(8, enable_checkpointing=False, limit_val_batches=0).fit(whole, here.splits(digits))
    first, rest = here.Net(), here.Net()
    begun = here.trainer(steps, enable_checkpointing=False, limit_val_batches=0)
    begun.fit(first, here.splits(digits))
    begun.save_checkpoint(path)
    here.trainer(8, enable_checkpointing=False, limit_val_batches=0).fit(rest, here.splits(digits), ckpt_path=path)
    assert whole.served == [(0, 256 * step) for step in range(5)] + [(1, 256 * step) for step in range(3)]
    assert first.served + rest.served == whole.served


def test_validation_reads_each_sample_once_and_reloaded_loaders_begin_the_next_epoch(digits, here):
    net = here.Net()
    run = here.trainer(10, enable_checkpointing=False, reload_dataloaders_every_n_epochs=1)
    run.fit(net, here.splits(digits, val="val"))
    assert int(run.callback_metrics["samples"]) == len(digits["val"])
    assert [epoch for epoch, _ in net.served] == [0] * 5 + [1] * 5


@pytest.mark.parametrize("several", [False, True])
def test_versions_are_saved_with_any_loader_and_continued(tmp_path, several, here):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    loader = DataLoader(TensorDataset(torch.rand(24, 3, 8, 8), torch.randint(4, (24,))), batch_size=4)
    for number, steps in enumerate((9, 15), 1):
        versions = here.VersionCallback(repo, "net", every=100, config={"batch_size": 4})
        run = here.lightning.Trainer(max_steps=steps, callbacks=[versions], enable_checkpointing=False, **here.QUIET)
        run.fit(here.Net(), {"a": loader} if several else loader, ckpt_path=versions.checkpoints.newest())
        found = repo.models.restore("net")
        assert (found.version.version, found.entry["step"], found.entry["data"]) == (number, steps, [])
        assert "loader" not in found.state
        assert found.entry["config"] == {"batch_size": 4}
        assert found.state["optimizer_states"][0]["state"][0]["step"] == steps
    assert found.entry["parent"] == "net@1"


def test_a_loader_of_datasvc_without_the_data_module_continues_at_the_end_of_an_epoch_too(digits, tmp_path, here):
    repo, nets = datasvc.open(str(tmp_path / "repo"), create=True), [here.Net(), here.Net()]
    for net, steps in zip(nets, (5, 7), strict=True):
        versions = here.VersionCallback(repo, "net")
        with here.ImageLoader(digits["train"], training=True, batch_size=256, size=8) as loader:
            run = here.trainer(steps, callbacks=[versions], enable_checkpointing=False, limit_val_batches=0)
            run.fit(net, loader, ckpt_path=versions.checkpoints.newest())
        assert versions.checkpoints.version == repo.models.versions("net")[-1]
    assert nets[1].served == [(1, 0), (1, 256)]


def test_files_stay_files_beside_versions(digits, tmp_path, here):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    versions = here.VersionCallback(repo, "net", every=3)
    files = here.lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "files", every_n_train_steps=3)
    here.trainer(3, callbacks=[versions, files], limit_val_batches=0).fit(here.Net(), here.splits(digits))
    (path,) = (tmp_path / "files").iterdir()
    state = torch.load(path, weights_only=False)["state_dict"]
    assert torch.equal(state["layer.weight"], repo.models.restore("net@1").state["state_dict"]["layer.weight"])
    rest = here.Net()
    again = here.trainer(
        5, callbacks=[here.VersionCallback(repo, "net")], enable_checkpointing=False, limit_val_batches=0
    )
    again.fit(rest, here.splits(digits), ckpt_path=path)
    assert rest.served == [(0, 3 * 256), (0, 4 * 256)]


@pytest.mark.parametrize(("at", "validations"), [(2, 0), (5, 1)], ids=["middle", "end of an epoch"])
def test_a_signal_ends_the_fit_after_the_step_before_the_minimum_and_without_a_validation(
    digits, tmp_path, here, at, validations
):
    """What Lightning would do first may take longer than the grace period."""
    repo, net = datasvc.open(str(tmp_path / "repo"), create=True), here.Net()
    versions = here.VersionCallback(repo, "net", grace="100s")

    class Interrupt(here.lightning.Callback):
        num_validations = 0

        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == at - 1:
                signal.raise_signal(signal.SIGTERM)

        def on_validation_start(self, trainer, *_):
            self.num_validations += not trainer.sanity_checking

    interrupt = Interrupt()
    run = here.trainer(20, min_epochs=3, min_steps=12, callbacks=[interrupt, versions], enable_checkpointing=False)
    run.fit(net, here.splits(digits, val="val"))
    assert len(net.served) == at
    assert interrupt.num_validations == validations
    assert versions.checkpoints.stop_signal == signal.SIGTERM
    assert repo.models.restore("net").entry["step"] == at


def test_a_strategy_that_shards_the_model_is_refused(tmp_path, here):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    sharded = SimpleNamespace(strategy=object.__new__(here.lightning.pytorch.strategies.FSDPStrategy))
    with pytest.raises(ConfigError, match="FSDPStrategy shards the model"):
        here.VersionCallback(repo, "net").setup(sharded, None, "fit")
