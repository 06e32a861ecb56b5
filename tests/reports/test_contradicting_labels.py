"""One picture under two labels: what a model learns from it is chance, and no number shows it."""

import pytest

from datasvc.errors import ConflictError
from datasvc.repository.branching import create_branch
from datasvc.shards import ingest, open_dataset
from datasvc.shards.history.columns import label
from datasvc.shards.history.merge_branch import merge_branch
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.merge import merge
from datasvc.shards.versions.verify import verify
from tests.cli.command import run
from tests.samples import jpeg


def write(folder, seeds):
    """Write images by path, each drawn from its seed; returns the folder."""
    for path, seed in seeds.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(jpeg(seed=seed))
    return str(folder)


def pairs(conflicts):
    return [(each.key, each.label, each.other_key, each.other_label) for each in conflicts]


def test_a_picture_in_two_classes_is_reported_by_ingest_and_verify(repository, tmp_path):
    """BMEII-AI/RadImageNet#17, jhl-Det/CVA-Net#27: equal pictures in the folders of two pathologies."""
    source = {"cat/1.jpg": 1, "cat/2.jpg": 2, "dog/3.jpg": 2, "dog/4.jpg": 4, "dog/5.jpg": 4}
    done = ingest(repository, write(tmp_path / "a", source), "pets", keep_order=True)
    assert pairs(done.conflicts) == [("dog/3.jpg", "dog", "cat/2.jpg", "cat")]
    assert pairs(verify(repository, "pets").conflicts) == pairs(done.conflicts)
    output = run("verify", "pets", "--repo", repository.url)
    assert output.returncode == 3
    assert "train/dog/3.jpg has the label 'dog', and train/cat/2.jpg with the same content 'cat'" in output.stdout


def test_contradicting_labels_are_resolved_by_a_correction(repository, tmp_path):
    """BMEII-AI/RadImageNet#17, jhl-Det/CVA-Net#27: what `verify` lists, `label` corrects, without a new ingest."""
    source = {"cat/1.jpg": 1, "cat/2.jpg": 2, "dog/3.jpg": 2}
    ingest(repository, write(tmp_path / "a", source), "pets", keep_order=True)
    label(repository, "pets", "key = 'dog/3.jpg'", "cat")
    assert not verify(repository, "pets", deep=True).conflicts
    label(repository, "pets", "key = 'cat/1.jpg'", "dog")
    more = ingest(repository, write(tmp_path / "b", {"cat/9.jpg": 1}), "pets", append=True)
    assert pairs(more.conflicts) == [("cat/9.jpg", "cat", "cat/1.jpg", "dog")]


def test_a_picture_that_is_appended_under_another_label_is_reported_once(repository, tmp_path):
    """billpsomas/rscir#6: a correction that is appended leaves the wrong sample where it is."""
    ingest(repository, write(tmp_path / "a", {"cat/1.jpg": 1, "dog/2.jpg": 2}), "pets")
    moved = write(tmp_path / "b", {"dog/1.jpg": 1, "dog/9.jpg": 9})
    done = ingest(repository, moved, "pets", append=True)
    assert pairs(done.conflicts) == [("dog/1.jpg", "dog", "cat/1.jpg", "cat")]
    assert not ingest(repository, write(tmp_path / "c", {"cat/7.jpg": 7}), "pets", append=True).conflicts
    delete(repository, "pets", keys=["cat/1.jpg"])
    assert not verify(repository, "pets").conflicts


def test_labels_of_two_splits_may_not_contradict_each_other_either(repository, tmp_path):
    """jhl-Det/CVA-Net#27: the copy is in the other split."""
    source = write(tmp_path / "a", {"train/cat/1.jpg": 1, "train/dog/2.jpg": 2, "val/dog/3.jpg": 1})
    done = ingest(repository, source, "pets", on_split_overlap="keep")
    (conflict,) = done.conflicts
    assert {conflict.split, conflict.other_split} == {"train", "val"}


@pytest.mark.parametrize("labels", [(1, 1), (None, 1), (-1, 1)])
def test_equal_or_missing_labels_contradict_nothing(repository, labels):
    """BMEII-AI/RadImageNet#17: the other way round."""
    samples = [{"key": str(number), "image": jpeg(seed=1), "label": label} for number, label in enumerate(labels)]
    samples += [{"key": "z", "image": jpeg(seed=2), "label": 2}]
    assert not ingest(repository, samples, "pets").conflicts
    assert len(open_dataset(repository, "pets")["train"]) == 3


@pytest.mark.parametrize(("one", "other"), [("cat", "dog"), ([1, 2], [1]), (True, False), (-0.5, 0.25)])
def test_labels_that_are_no_class_indices_are_compared_as_they_are(repository, one, other):
    """BMEII-AI/RadImageNet#17: text and several labels for a picture end neither an ingest nor `verify`."""
    samples = [
        {"key": str(number), "image": jpeg(seed=1), "label": label} for number, label in enumerate((one, other))
    ]
    done = ingest(repository, [*samples, {"key": "z", "image": jpeg(seed=1), "label": one}], "pets", keep_order=True)
    assert pairs(done.conflicts) == [("1", str(other), "0", str(one))]
    assert pairs(verify(repository, "pets").conflicts) == pairs(done.conflicts)


@pytest.mark.parametrize("option", [{"max_side": 16}, {"quality": 50}])
def test_an_append_keeps_how_pictures_are_made_smaller(repository, tmp_path, option):
    """BMEII-AI/RadImageNet#17: half of the pictures of a data set were small, the others as they came."""
    ingest(repository, write(tmp_path / "a", {"cat/1.jpg": 1}), "pets", **option)
    ingest(repository, write(tmp_path / "b", {"cat/2.jpg": 2}), "pets", append=True)
    assert open_dataset(repository, "pets").entry.content["source"]["options"].items() >= option.items()
    sizes = {len(sample["image"]) < len(jpeg(seed=1)) for sample in open_dataset(repository, "pets")["train"]}
    assert sizes == {True}


def test_an_append_with_other_options_says_which(repository, tmp_path):
    """fawazsammani/knowing-when-to-look-adaptive-attention#10: pictures of two sizes in one data set."""
    ingest(repository, write(tmp_path / "a", {"cat/1.jpg": 1}), "pets", max_side=16)
    arguments = ("ingest", write(tmp_path / "b", {"cat/2.jpg": 2}), "pets", "--repo", repository.url, "--append")
    planned = run(*arguments, "--max-side", "24", "--keep-order", "--dry-run").stdout
    assert "keep_order True (before: False), max_side 24 (before: 16)" in planned
    assert "differ" not in run(*arguments).stderr
    again = run(*arguments, "--max-side", "24", "--key-prefix", "b/").stderr
    assert "options differ from those of the version before: max_side 24 (before: 16)" in again


def test_a_dropped_copy_under_another_label_is_named(repository, tmp_path):
    """BMEII-AI/RadImageNet#17: the copy that was dropped had the right label."""
    source = write(tmp_path / "a", {"cat/1.jpg": 1, "dog/1.jpg": 1, "dog/2.jpg": 2})
    done = ingest(repository, source, "pets", duplicates="drop", keep_order=True)
    assert pairs(done.conflicts) == [("dog/1.jpg", "dog", "cat/1.jpg", "cat")]
    assert not verify(repository, "pets").conflicts


def test_duplicates_fail_refuses_contradictions_with_the_version_before(repository, tmp_path):
    """billpsomas/rscir#6: an append that may have no duplicates brought one of an older picture."""
    ingest(repository, write(tmp_path / "a", {"cat/1.jpg": 1, "dog/2.jpg": 2}), "pets")
    moved = write(tmp_path / "b", {"dog/1.jpg": 1})
    with pytest.raises(ConflictError, match=r"dog/1\.jpg has the label 'dog'.*nothing was committed"):
        ingest(repository, moved, "pets", append=True, duplicates="fail")
    assert open_dataset(repository, "pets").resolved.version == 1


@pytest.mark.parametrize("is_branch", [False, True])
def test_a_merge_reports_the_contradictions_that_it_brings_together(repository, tmp_path, is_branch):
    """jhl-Det/CVA-Net#27: two people labelled the same picture."""
    ingest(repository, write(tmp_path / "a", {"cat/0.jpg": 9, "dog/0.jpg": 8}), "pets")
    if is_branch:
        create_branch(repository, "pets", "b")
    other = "pets@b" if is_branch else "more"
    ingest(repository, write(tmp_path / "b", {"cat/1.jpg": 1, "dog/2.jpg": 2}), "pets", append=True)
    source = write(tmp_path / "c", {"dog/1.jpg": 1, "dog/3.jpg": 3, "cat/4.jpg": 4})
    ingest(repository, source, other, append=is_branch)
    done = merge_branch(repository, other, "pets") if is_branch else merge(repository, ["pets", other], "all")
    assert {frozenset((each.label, each.other_label)) for each in done.label_conflicts} == {frozenset({"cat", "dog"})}
    assert verify(repository, str(done.version)).conflicts
