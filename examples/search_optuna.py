"""A search for settings with Optuna: trials share a repository and decoded images, and each is a model.

    python examples/search_optuna.py --repo REPO --data digits@1 --study rates --init-from base@1 --trials 20

Started several times at once on a node, the processes work on one study, and decode each batch of images once. Killed
and started again, the study continues: Optuna repeats the trial of a dead process, from its newest version on.
"""

import argparse
import fcntl
import re
import tempfile
import warnings
from pathlib import Path

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

import datasvc
from datasvc.api import DataRepository
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.train import train


def run_trial(trial: optuna.Trial, args: argparse.Namespace) -> float:
    """Train with the settings of a trial; return the accuracy."""
    # A repeated trial has a number of its own, but the attributes of the first one: it continues that one's model.
    name = trial.user_attrs.get("name", f"{args.study}-{trial.number}")
    trial.set_user_attr("name", name)
    version = train(
        TrainConfig(
            data=args.data,
            repo=args.repo,
            name=name,
            init_from=args.init_from,
            # Data, order, batches and augmentation are those of all trials: these are decoded once.
            decode_group=args.study,
            size=args.size,
            batch_size=args.batch_size,
            epochs=args.epochs,
            checkpoint_every=args.checkpoint_every,
            learning_rate=trial.suggest_float("learning_rate", 1e-3, 1.0, log=True),
            momentum=trial.suggest_float("momentum", 0.5, 0.99),
        )
    )
    trial.set_user_attr("version", version)
    metrics: dict[str, float] = datasvc.open(args.repo).models.describe(version).entry["metrics"]
    return metrics["val_accuracy"]


def tag_best(study: optuna.Study, repo: DataRepository) -> str:
    """Move the tag `best` to the version of the best trial, and return that."""
    best: str = study.best_trial.user_attrs["version"]
    for name in repo.models.names():
        if re.fullmatch(rf"{re.escape(study.study_name)}-\d+", name) and "best" in repo.models.tags(name):
            repo.models.untag(name, "best")  # of an earlier end of this study
    repo.models.tag(best, "best")
    return best


def main() -> None:
    """Run trials until the study has as many as asked for, and tag the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--study", required=True, help="name of the study, and of its models before a number")
    parser.add_argument("--storage", default="sqlite:///study.db", help="database of the study, of all its processes")
    parser.add_argument("--init-from", help="version that all trials start from; by default, random weights")
    parser.add_argument("--trials", type=int, default=20, help="complete trials of the whole study, at least")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int, default=1000, help="steps")
    parser.add_argument("--heartbeat-s", type=int, default=60, help="a process that is silent twice as long is dead")
    args = parser.parse_args()

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of heartbeats
    with Path(tempfile.gettempdir(), f"{args.study}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that make the tables of a new database disturb each other
        storage = RDBStorage(
            args.storage,
            heartbeat_interval=args.heartbeat_s,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
        study = optuna.create_study(storage=storage, study_name=args.study, direction="maximize", load_if_exists=True)
    if len(study.get_trials(states=(TrialState.COMPLETE,))) < args.trials:
        stop = MaxTrialsCallback(args.trials, states=(TrialState.COMPLETE,))
        study.optimize(lambda trial: run_trial(trial, args), callbacks=[stop])
    best = tag_best(study, datasvc.open(args.repo))
    print(f"best trial: {study.best_trial.number}, {study.best_value:.4f}, {study.best_params}, {best}")


if __name__ == "__main__":
    main()
