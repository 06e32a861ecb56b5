"""Lightning: what a version has that is saved at the last batch of an epoch, or beside other callbacks."""

import functools
import itertools
import pathlib
from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import datasvc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
NUM_BATCHES, EPOCHS = 4, 4


@pytest.fixture
def repo(tmp_path):
    return datasvc.open(str(tmp_path / "repo"), create=True)


def make_net(interval):
    import lightning

    class Net(lightning.LightningModule):
        """Its validation gets worse in each epoch, so that the plateau schedule halves the rate."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.rates = []

        def training_step(self, batch, _):
            self.rates.append((self.global_step, self.optimizers().param_groups[0]["lr"]))
            inputs, targets = batch
            return (self.layer(inputs) - targets).square().mean()

        def validation_step(self, *_):
            self.log("worse", float(self.current_epoch))

        def configure_optimizers(self):
            adam = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, factor=0.5)
            frequency = 1 if interval == "epoch" else NUM_BATCHES
            settings = {"scheduler": schedule, "monitor": "worse", "interval": interval, "frequency": frequency}
            return {"optimizer": adam, "lr_scheduler": settings}

    torch.manual_seed(1)
    return Net()


class KilledError(Exception):
    pass


def fit(repo, name, *, every=100, killed_at=None, interval="epoch", callbacks=(), **options):
    import lightning

    from datasvc.integrations.lightning import VersionCallback

    class Kill(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == killed_at:
                raise KilledError

    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, generator=draw), torch.randn(24, 1, generator=draw))
    versions, net = VersionCallback(repo, name, every=every), make_net(interval)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[versions, *callbacks, Kill()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", **options,
    )  # fmt: skip
    ref = versions.checkpoints.newest()
    try:
        trainer.fit(net, DataLoader(data, batch_size=6), DataLoader(data, batch_size=24), ckpt_path=ref)
    except KilledError:
        assert killed_at is not None
    return net


def newest(repo, name):
    return repo.models.restore(str(repo.models.versions(name)[-1]))


@pytest.mark.parametrize(
    ("interval", "every", "options"),
    [("epoch", 4, {}), ("epoch", 8, {}), ("step", 4, {}), ("epoch", 4, {"accumulate_grad_batches": 3}),
     ("epoch", 6, {"limit_train_batches": 3})],
)  # fmt: skip
def test_a_version_of_the_last_batch_has_the_validation_and_the_schedules_of_its_epoch(
    repo, interval, every, options
):
    """Lightning-AI/pytorch-lightning#7637, #7877: schedules step after a checkpoint of the last batch is saved."""
    steps_per_epoch = {"accumulate_grad_batches": 2, "limit_train_batches": 3}.get(
        next(iter(options), ""), NUM_BATCHES
    )
    whole = fit(repo, "whole", interval=interval, **options)
    killed_at = 2 * steps_per_epoch + 1
    fit(repo, "killed", every=every, killed_at=killed_at, interval=interval, **options)
    found = newest(repo, "killed")
    assert found.entry["step"] == 2 * steps_per_epoch
    rest = fit(repo, "killed", interval=interval, **options)
    assert rest.rates == [(step, rate) for step, rate in whole.rates if step >= found.entry["step"]]
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_the_schedule_steps_at_the_end_of_an_epoch_that_continues_a_version(repo):
    """Lightning-AI/pytorch-lightning#14699: after a restart within an epoch, its plateau schedule stays behind."""
    whole = fit(repo, "whole")
    fit(repo, "killed", every=3, killed_at=10)
    assert newest(repo, "killed").entry["step"] == 9
    rest = fit(repo, "killed")
    assert rest.rates == whole.rates[9:]


@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_version_has_the_averages_of_a_callback_that_stands_behind_it(repo, kind):
    """ecmwf/anemoi-core#1373, mllam/neural-lam#739: averaged weights of a run that was started again."""
    import lightning.pytorch.callbacks as made

    def make():
        return [getattr(made, kind)(**({"swa_lrs": 0.01, "swa_epoch_start": 1} if kind.startswith("S") else {}))]

    fit(repo, "whole", callbacks=make())
    fit(repo, "killed", every=4, killed_at=10, callbacks=make())
    assert newest(repo, "killed").entry["step"] == 8
    fit(repo, "killed", callbacks=make())
    whole, rest = newest(repo, "whole").state, newest(repo, "killed").state
    for name, value in whole["state_dict"].items():
        assert torch.equal(rest["state_dict"][name], value), name


def test_saves_in_each_step_are_each_the_state_of_that_step(repo):
    """Lightning-AI/pytorch-lightning#4655: schedules lag behind by what was stepped after the checkpoint."""
    net = fit(repo, "net", every=1)
    entries = [repo.models.restore(str(version)) for version in repo.models.versions("net")]
    assert [found.entry["step"] for found in entries] == [*range(1, EPOCHS * NUM_BATCHES + 1)]
    rates = dict(net.rates)
    for found in itertools.islice(entries, len(entries) - 1):
        assert found.state["optimizer_states"][0]["param_groups"][0]["lr"] == rates[found.entry["step"]]


def test_hyperparameters_that_are_no_json_end_no_fit(repo, monkeypatch):
    """materialyzeai/matgl#802, Lightning-AI/pytorch-lightning#525: the first save ended the training."""
    values = {
        "path": pathlib.Path("x"),
        "made_by": functools.partial(torch.optim.SGD, lr=0.1),
        "loss": torch.nn.MSELoss(),
    }
    make = make_net

    def make_net_of_values(interval):
        net = make(interval)
        net.save_hyperparameters(values)
        return net

    monkeypatch.setitem(globals(), "make_net", make_net_of_values)
    with pytest.warns(RuntimeWarning, match=r"hyper_parameters\.loss .*ignore="):
        fit(repo, "net")
    stored = repo.models.restore("net").state["hyper_parameters"]
    assert stored["path"] == pathlib.Path("x")
    assert stored["made_by"]["keywords"] == {"lr": 0.1}
    assert "loss" not in stored
