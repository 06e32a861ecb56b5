"""What a preview by the high bytes of numbers reads, and how far its numbers are from the stored: see `models.py`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from models_states import NO_CODE, State, tensors_of
from report import Report

from datasvc.models import restore, save
from datasvc.repository import Repository


def measure_previews(report: Report, states: Sequence[State], folder: Path, *, what: str) -> None:
    """Add the bytes that `planes=2` reads of each consecutive version, over all, and its largest relative error."""
    for codec in ("planes", "delta"):
        target = folder / codec
        shutil.rmtree(target, ignore_errors=True)
        repository = Repository.create(str(target))
        shares, errors = [], []
        for step, state in enumerate(states):
            version = save(repository, "resnet", state, step=step, codec=codec, code=NO_CODE)
            preview = restore(repository, version, planes=2)
            read = sum(preview.report.came_bytes.values())
            shares.append(read / sum(restore(repository, version).report.came_bytes.values()))
            errors.append(_largest_error(tensors_of(state), tensors_of(preview.state)))
        report.add_row(f"{what}, codec {codec}: read by planes=2 / stored", "", shares)
        report.add_row(f"{what}, codec {codec}: largest relative error of planes=2", "", errors)


def _largest_error(exact: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of normal numbers; smaller ones have a bound of their own."""
    largest = 0.0
    for name, tensor in exact.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        is_normal = tensor.abs() >= torch.finfo(tensor.dtype).tiny
        difference = (found[name] - tensor).abs() / tensor.abs()
        largest = max(largest, float(difference[is_normal].max()) if bool(is_normal.any()) else 0.0)
    return largest
