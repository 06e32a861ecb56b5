"""A small checkpoint whose tensors are stored in every way there is."""

import torch

from datasvc.models import save
from datasvc.models.registry.registry import describe_model
from datasvc.models.tensors.tensor_table import read_table


def state_of(step):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (90_000,), dtype=torch.uint8, generator=generator)
    weight = torch.randn(80, 512, generator=generator)
    frozen = torch.randn(70, 512, generator=generator)
    changed = weight * (1 + step * 1e-6)
    small = {f"bias{number}": torch.randn(9, generator=generator) for number in range(3)}
    return {"model": {"noise": noise, "frozen": frozen, "weight": changed, **small},
            "step": step, "lr": float("inf"), "rng": b"\x00\x01"}  # fmt: skip


def save_every_kind(repository, name="m"):
    """Save two versions of `name`; the second one's objects are raw, planes, a pack and a difference."""
    save(repository, name, state_of(0), step=0)
    version = save(repository, name, state_of(1), step=1)
    encodings = {link.encoding for link in links_of(repository, str(version))}
    assert {"raw", "planes"} < encodings, encodings
    return version


def records_of(repository, ref):
    return read_table(repository.objects, describe_model(repository, ref).tensors)


def links_of(repository, ref):
    return [link for record in records_of(repository, ref) for chunk in record.chunks for link in chunk.chain]


def equal(state, other):
    """Return whether two states are equal, bit for bit."""
    if isinstance(state, torch.Tensor):
        return state.dtype == other.dtype and torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(equal(state[key], other[key]) for key in state)
    return state == other


def flip(path, offset, bit=0):
    """Change one bit of a file where it lies, and return what it was."""
    raw = path.read_bytes()
    place = offset % len(raw)
    path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << bit)]) + raw[place + 1 :])
    return raw


def copy_of(repository, folder):
    """Return a second repository with the same objects."""
    import shutil

    from datasvc.repository import Repository

    shutil.copytree(repository.url, folder)
    return Repository.open(str(folder))
