"""A search for settings with Ray Tune: trials share a repository and decoded images, and each is a model.

    python examples/search_ray.py --repo REPO --data digits@1 --study rates --init-from base@1 --trials 20

Killed and started again, the study continues: a trial that had not ended continues its newest version. So does a
trial whose worker is lost.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from ray import tune

import datasvc


def run_trial(chosen: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train with the settings of a trial, in a worker of Ray; return its metrics and version."""
    from datasvc.trainer.recipes.settings.config import TrainConfig
    from datasvc.trainer.recipes.train import train

    config = TrainConfig(
        data=args.data,
        repo=args.repo,
        name=f"{args.study}-{tune.get_context().get_trial_id()}",
        init_from=args.init_from,
        # Data, order, batches and augmentation are those of all trials: the trials of a node decode them once.
        decode_group=args.study,
        size=args.size,
        batch_size=args.batch_size,
        epochs=args.epochs,
        checkpoint_every=args.checkpoint_every,
        **chosen,
    )
    version = train(config)
    return {**datasvc.open(args.repo).models.describe(version).entry["metrics"], "version": version}


def open_tuner(args: argparse.Namespace) -> tune.Tuner:
    """Return the tuner of a new study, or of one that was started before."""
    trainable = tune.with_resources(tune.with_parameters(run_trial, args=args), {"cpu": args.cpus, "gpu": args.gpus})
    folder = f"{args.storage}/{args.study}"
    if tune.Tuner.can_restore(folder):
        return tune.Tuner.restore(folder, trainable, resume_unfinished=True, resume_errored=True)
    return tune.Tuner(
        trainable,
        param_space={"learning_rate": tune.loguniform(1e-3, 1.0), "momentum": tune.uniform(0.5, 0.99)},
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max", num_samples=args.trials),
        run_config=tune.RunConfig(
            name=args.study, storage_path=args.storage, failure_config=tune.FailureConfig(max_failures=2)
        ),
    )


def main() -> None:
    """Run the trials of the study that have not ended, and tag the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--study", required=True, help="name of the study, and of its models before an id")
    parser.add_argument("--storage", default="studies", help="folder of studies, which all nodes have")
    parser.add_argument("--init-from", help="version that all trials start from; by default, random weights")
    parser.add_argument("--trials", type=int, default=20, help="of a new study")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int, default=1000, help="steps")
    parser.add_argument("--cpus", type=float, default=1, help="of a trial")
    parser.add_argument("--gpus", type=float, default=0, help="of a trial")
    args = parser.parse_args()
    repo = datasvc.open(args.repo)
    args.repo = repo.repository.url  # absolute: workers have a folder of their own
    args.storage = str(Path(args.storage).absolute())

    best = open_tuner(args).fit().get_best_result("val_accuracy", "max")
    for name in repo.models.names():
        if re.fullmatch(rf"{re.escape(args.study)}-[0-9a-f]+(_\d+)?", name) and "best" in repo.models.tags(name):
            repo.models.untag(name, "best")  # of an earlier end of this study
    repo.models.tag(best.metrics["version"], "best")
    print(f"best trial: {best.metrics['version']}, {best.metrics['val_accuracy']:.4f}, {best.config}")


if __name__ == "__main__":
    main()
