import math

import pytest
import torch

from datasvc.errors import NotFoundError
from datasvc.models import CodeRevision, DataUse, save
from datasvc.models.registry.diff import compare_values, diff
from datasvc.models.registry.retention import remove
from datasvc.models.tensors.tensor_table import join_chunks
from datasvc.models.tensors.write import TensorBlock, store_chunks
from datasvc.models.versions.architecture import Architecture
from datasvc.models.versions.commit import StoredState, VersionMetadata, commit
from tests.progress import RecordedProgress


def save_state(repository, state, **about):
    about = {"step": 0, "code": CodeRevision("abc", dirty=False), "environment": {}, **about}
    return str(save(repository, "m", state, **about))


def changes(repository, a, b):
    return {change.name: change for change in diff(repository, a, b).tensors.changes}


def test_every_part_of_an_entry_is_compared(repository):
    first = save_state(
        repository, {}, step=1, config={"lr": 0.1, "net": {"depth": 3}}, metrics={"acc": 0.5},
        data=[DataUse("pets@1", "train", {"epoch": 1})],
        architecture=Architecture({"Conv2d": 2}, {"conv2d": 2}),
    )  # fmt: skip
    second = save_state(
        repository, {}, step=9, config={"lr": 0.2, "net": {"width": 8}}, metrics={"acc": 0.75, "loss": 1.0},
        data=[DataUse("pets@1", "train", {"epoch": 2})], code=CodeRevision("def", dirty=True),
        architecture=Architecture({"Conv2d": 3, "Linear": 1}),
    )  # fmt: skip
    found = diff(repository, first, second)
    assert (found.steps, found.values["data"].changed) == ((1, 9), {"pets@1/train.epoch": (1, 2)})
    config, metrics, code = (found.values[part] for part in ("config", "metrics", "code"))
    assert (config.added, config.removed, config.changed) == ({"net.width": 8}, {"net.depth": 3}, {"lr": (0.1, 0.2)})
    assert (metrics.added, metrics.changed) == ({"loss": 1.0}, {"acc": (0.5, 0.75)})
    assert (code.changed["revision"], code.changed["dirty"]) == (("abc", "def"), (False, True))
    assert not found.values["environment"]
    modules, ops = (found.values[part] for part in ("modules", "ops"))
    assert (modules.added, modules.changed, ops.removed) == ({"Linear": 1}, {"Conv2d": (2, 3)}, {"conv2d": 2})


def test_values_of_different_kinds_differ_even_where_python_calls_them_equal():
    assert compare_values({"a": 1, "b": []}, {"a": True, "b": []}).changed == {"a": (1, True)}
    assert compare_values({"a": {}}, {"a": {"x": 1}}).added == {"a.x": 1}


def test_tensors_are_added_removed_retyped_changed_or_equal(repository):
    first = save_state(
        repository,
        {"same": torch.ones(4), "old": torch.ones(2), "half": torch.ones(3), "w": torch.tensor([3.0, 4.0])},
    )
    second = save_state(
        repository,
        {"same": torch.ones(4), "new": torch.ones(2), "half": torch.ones(3).half(), "w": torch.tensor([3.0, 6.0])},
    )
    found = diff(repository, first, second).tensors
    assert [record.name for record in found.added] == ["new"]
    assert [record.name for record in found.removed] == ["old"]
    assert [(old.dtype, new.dtype) for old, new in found.retyped] == [("float32", "float16")]
    assert (found.changed, found.num_equal) == (("w",), 1)
    (change,) = found.changes
    assert (change.norm, change.relative, change.num_changed, change.num_elements) == (2.0, 0.4, 1, 2)
    assert diff(repository, first, second, norms=False).tensors.changes == ()


@pytest.mark.slow
def test_the_norm_of_a_change_over_many_chunks_is_that_of_the_whole(repository):
    torch.manual_seed(1)
    before = torch.randn(5_000_000)  # 20 MB: three chunks
    after = before.clone()
    after[4_000_000:] += 0.01 * torch.randn(1_000_000)
    first, second = save_state(repository, {"w": before}), save_state(repository, {"w": after})
    progress = RecordedProgress()
    diff(repository, first, second, progress=progress)
    assert (progress.totals, progress.total, len(progress.amounts) > 1) == ([20_000_000], 20_000_000, True)
    change = changes(repository, first, second)["w"]
    exact = (after.double() - before.double()).norm().item()
    assert math.isclose(change.norm, exact, rel_tol=1e-9)
    assert math.isclose(change.relative, exact / before.double().norm().item(), rel_tol=1e-9)
    assert change.num_changed == int((after != before).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_any_dtype_are_measured(repository, dtype):
    unit = 1j if dtype.is_complex else 1
    first = save_state(repository, {"w": torch.tensor([0.0, unit, unit]).to(dtype)})
    second = save_state(repository, {"w": torch.tensor([unit, unit, 1.0 * unit]).to(dtype)})
    change = changes(repository, first, second)["w"]
    assert (change.norm, change.num_changed) == (1.0, 1)


def test_differences_that_are_no_numbers_are_counted_and_left_out_of_the_norm(repository):
    first = save_state(repository, {"w": torch.tensor([1.0, math.nan, 0.0])})
    second = save_state(repository, {"w": torch.tensor([2.0, math.nan, math.inf])})
    change = changes(repository, first, second)["w"]
    assert (change.norm, change.num_changed, change.num_nonfinite) == (1.0, 2, 2)


def test_a_change_from_nothing_has_no_relative_size(repository):
    first, second = save_state(repository, {"w": torch.zeros(2)}), save_state(repository, {"w": torch.ones(2)})
    assert changes(repository, first, second)["w"].relative is None


def test_tensors_that_are_cut_into_other_chunks_are_compared_by_their_elements(repository):
    whole = torch.arange(8.0).reshape(4, 2)
    first = save_state(repository, {"w": whole})
    halves = [TensorBlock("w", (0, 0), whole[:2]), TensorBlock("w", (2, 0), whole[2:] + 1)]
    stored = store_chunks(repository.objects, halves)
    record = join_chunks("w", "float32", (4, 2), [chunk for _, chunk in stored.chunks])
    second = str(
        commit(repository, "m", StoredState([record], {"w": {"$tensor": "w"}}, new_bytes=0), VersionMetadata(step=1))
    )
    change = changes(repository, first, second)["w"]
    assert (change.norm, change.num_changed) == (2.0, 4)


def test_a_removed_version_is_not_compared(repository):
    first, second = save_state(repository, {}), save_state(repository, {"w": torch.ones(1)})
    remove(repository, [first])
    with pytest.raises(NotFoundError, match="m@1 was removed"):
        diff(repository, first, second)
