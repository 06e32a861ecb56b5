"""The capabilities of this installation, in the format of `horovodrun --check-build`."""

from __future__ import annotations


def describe_build() -> str:
    """Return a table of the available frameworks, launchers and tensor operations. Imports torch."""
    import torch
    import torch.distributed as dist

    has_distributed = dist.is_available()
    # srun and mpirun need nothing in this installation: `init` reads the variables that they set. Of the operations,
    # MPI, CCL and DDL exist in Horovod only.
    features_by_title = [
        ("Frameworks", [("PyTorch " + torch.__version__, True)]),
        ("Launchers", [("this one", True), ("torchrun", has_distributed), ("srun", True), ("mpirun", True)]),
        (
            "Tensor operations",
            [
                ("Gloo", has_distributed and dist.is_gloo_available()),
                ("NCCL", has_distributed and dist.is_nccl_available()),
                ("CUDA", torch.cuda.is_available()),
                ("MPI", False),
                ("CCL", False),
                ("DDL", False),
            ],
        ),
    ]
    sections = [
        [f"{title}:", *(f"    [{'X' if is_available else ' '}] {name}" for name, is_available in features)]
        for title, features in features_by_title
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)
