"""`datasvc.trainer profile --check` of ResNet-50 and AlexNet on one GPU: predicted by measured step time."""

from __future__ import annotations

from datasvc.threads import count_processors
from gpu_stages.photo_data import NUM_PHOTOS, make_photos
from gpu_stages.stage import Stage
from tools.bench.profile_check import add_profile, measure

WORKLOADS = {
    "ResNet-50": ["--model", "resnet50", "--batch-size", "128"],
    "AlexNet": ["--model", "alexnet", "--batch-size", "256"],
}
ON_GPU = ["--size", "224", "--device", "cuda", "--precision", "bf16", "--channels-last"]
TINY = {"small CNN": ["--model", "small-cnn", "--batch-size", "4", "--size", "32"]}
REPEATS, STEPS = 5, 20


def run(stage: Stage) -> None:
    """Profile both models, or a small one on the CPU."""
    with stage.timed("photos"):
        make_photos(stage.kept, num_images=stage.choose(*NUM_PHOTOS))
    repository, threads = str(stage.kept / "repository"), stage.choose(count_processors(), 1)
    repeats, steps = stage.choose((REPEATS, STEPS), (1, 1))
    for workload, options in stage.choose(WORKLOADS, TINY).items():
        with stage.timed(workload):
            given = [*options, *stage.choose(ON_GPU, [])]
            profile = measure(given, repository, repeats, steps, threads, data="photos", ranks=1)
            add_profile(stage.report, workload, profile)
    stage.need_gpu("a small model was profiled on the CPU; nothing was profiled on a GPU")
