"""Replicas of several ranks average their weights as replicas of one rank do, whatever axes divide them inside."""

import json

import pytest
import torch

import datasvc
from datasvc.ledger.audit import audit_folders
from tests.distributed.test_layout_resumes import TIMEOUT_S, assert_close, url
from tests.support import warm_python

__all__ = ["url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SGD = {"optimizer": "sgd", "learning_rate": 0.1, "ema_decay": None, "max_steps": 6}
ADAM = {"ema_decay": None, "max_steps": 6}
LATE = {"lost_after": 120.0}  # on a busy machine a rank may wait for its processor
SYNCS = {
    "local": "local:4",
    "diloco": "diloco:4:fragments=2,delay=1,alpha=0.25",
    "easgd": "easgd:3:0.9",
    "gossip": "gossip:ring",
    "hierarchical": "hierarchical:2,4",
}
# Replicas of two ranks, each of which is compared with two replicas of one rank.
PAIRS = [("shard", sync) for sync in SYNCS] + [("data", "local"), ("tensor", "local"), ("context", "local")]
# Saved in the middle of a round, for DiLoCo with a fragment on its way.
KILLED = {"layout": "replica=2,shard=2", "sync": "local:3", **ADAM, **LATE}
STOPPED = {"layout": "replica=2,tensor=2", "sync": "diloco:4:fragments=2,delay=1", **ADAM, **LATE}
LAYOUTS = {
    **{sync: {"sync": text, **SGD} for sync, text in SYNCS.items()},
    **{
        f"{axis}-{sync}": {"layout": f"replica=2,{axis}=2", "sync": SYNCS[sync], **SGD, **LATE}
        for axis, sync in PAIRS
    },
    "bsp": {"layout": "data=2,shard=2", **SGD, **LATE},
    "replica-bsp": {"layout": "replica=2,shard=2", **SGD, **LATE},
    "killed": {**KILLED, "kill_at": 5, "checkpoint_every": 1},
    "stopped": {**STOPPED, "max_steps": 3},
    "whole-killed": KILLED,
    "whole-stopped": STOPPED,
    "elsewhere": {**KILLED, "layout": "replica=2,data=2"},
}


def test_replicas_of_two_ranks_train_as_replicas_of_one_and_continue_with_the_same_bits(launcher, url, tmp_path):
    epoch = {**LAYOUTS["shard-local"], "epochs": 1, "max_steps": None, "ledger": str(tmp_path / "ledger")}
    leased = {**epoch, "leases": "measured", "ledger": str(tmp_path / "leased")}

    def request(save, resume=()):
        return json.dumps(
            {"layouts": {**LAYOUTS, "epoch": epoch, "leased": leased}, "save": save, "resume": resume, "init": []}
        )

    program = launcher.program("layout_resumes.py")
    # By the fifth step, two later saves have been queued, so that of the first step is complete.
    killed = launcher.run(4, warm_python.command(), program, url, request(["killed"]), timeout_s=TIMEOUT_S)
    assert "rank 2 was the first to fail" in killed.stderr
    launcher.run_program(2, program, url, request(list(SYNCS)), timeout_s=TIMEOUT_S)
    saved = [name for name in LAYOUTS if name not in {*SYNCS, "killed", "elsewhere"}]
    resumed = [("killed", "whole-killed"), ("stopped", "whole-stopped"), ("killed", "elsewhere")]
    launcher.run_program(4, program, url, request([*saved, "epoch", "leased"], resumed), timeout_s=TIMEOUT_S)

    models = datasvc.open(url).models
    final = {name: models.restore(name) for name in models.names()}
    assert_close(final["replica-bsp"].state["model"], final["bsp"].state["model"], tolerance=1e-6)
    for axis, sync in PAIRS:
        found, expected = final[f"{axis}-{sync}"], final[sync]
        assert_close(found.state["model"], expected.state["model"], f"{axis} {sync}")
        assert found.entry["metrics"] == pytest.approx(expected.entry["metrics"], abs=1e-5), (axis, sync)
    for name in ("killed", "stopped"):
        continued, whole = final[f"{name}-then-whole-{name}"].entry, final[f"whole-{name}"].entry
        assert (continued["content"], continued["metrics"]) == (whole["content"], whole["metrics"]), name
    # At another layout, a run continues from the mean.
    assert final["killed-then-elsewhere"].entry["step"] == 6
    layout = final["shard-local"].entry["execution"]["layout"]
    assert (layout["replica"], layout["data"], layout["shard"]) == (2, 1, 2)
    weights = [rank["weights"]["tokens.weight"] for rank in final["shard-local"].state["rank_state"]]
    assert not torch.equal(weights[0], weights[2]), "the run ends in the middle of a round"
    for ledger in ("ledger", "leased"):
        audit = audit_folders([tmp_path / ledger])
        assert audit.is_proven
        assert [each.served for each in audit.epochs] == [96]
    # With leases, whatever the shares were, the steps that are recorded lead to those of the run.
    keys = [sample["key"] for sample in datasvc.open(url).dataset("tokens@1")["train"]]
    steps = {use.step for use in models.trained_on(["leased"], keys=keys).all_uses()}
    assert steps == set(range(1, final["leased"].entry["step"] + 1))
