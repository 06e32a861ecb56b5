import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.registry.removal import remove
from datasvc.models.search import find_versions
from datasvc.models.search import index as search_index
from datasvc.models.search.columns import FieldColumn
from datasvc.models.search.evaluate import evaluate
from datasvc.models.search.expression import And, Compare, Is, Not, Or, Within, parse_expression
from datasvc.models.search.index import INDEX_PATH, IndexPart, VersionIndex, decode_index, encode_index, read_index
from datasvc.repository import Repository
from datasvc.repository.logs.log import Log
from datasvc.repository.store.storage import Storage
from tests.models.entries import commit_entry
from tests.progress import RecordedProgress


@pytest.fixture
def full(repository):
    """Versions of two models that differ in everything that can be asked for."""
    commit_entry(repository, "cnn", step=100, metrics={"top1": 0.5}, config={"lr": 0.1, "net": {"depth": 18}})
    commit_entry(repository, "cnn", step=200, metrics={"top1": 0.8, "loss": "nan"}, parent="cnn@1", data=["pets@3"])
    commit_entry(
        repository, "cnn", step=300, metrics={"top1": 0.9, "val/top-5": 0.99}, parent="cnn@2", merged=["vit@1"],
        data=["pets@3", "imagenet@3"], message="warm restart", code={"revision": "abc", "dirty": True},
    )  # fmt: skip
    commit_entry(repository, "vit", step=400, metrics={"top1": 0.7}, config={"lr": 0.2, "betas": [0.9, 0.95]})
    repository.tag("models", "cnn@2", "prod")
    return repository


def found(repository, condition, **options):
    return [str(version) for version in find_versions(repository, condition, **options)]


@pytest.mark.parametrize(
    ("condition", "versions"),
    [
        ("top1 > 0.75 and data = 'imagenet@3'", ["cnn@3"]),
        ("metrics.top1 >= .7 and step <= 3e2", ["cnn@3", "cnn@2"]),
        ("data = 'pets'", ["cnn@3", "cnn@2"]),
        ("data != 'imagenet'", ["cnn@2"]),
        ("data is null", ["cnn@1", "vit@1"]),
        ("not data = 'pets'", ["cnn@1", "vit@1"]),
        ("tag = 'prod'", ["cnn@2"]),
        ("tag is null and name = 'cnn'", ["cnn@3", "cnn@1"]),
        ("config.net.depth = 18 or lr = 0.2", ["cnn@1", "vit@1"]),
        ("betas = 0.95", ["vit@1"]),
        ("parent = 'vit'", ["cnn@3"]),
        ("parent in ('cnn@1', 'cnn@2') and step > 200", ["cnn@3"]),
        ("message like 'warm%' or code like 'ab_'", ["cnn@3"]),
        ("code.dirty", ["cnn@3"]),
        ("code.dirty = false and loss is nan", ["cnn@2"]),
        ('"val/top-5" > 0.9 and metrics.val/top-5 < 1', ["cnn@3"]),
        ("created >= '2020-01-01' and name in ('vit')", ["vit@1"]),
        ("version = 1 and (name = 'vit' or top1 not in (0.7))", ["cnn@1", "vit@1"]),
        ("num_nonfinite > 0", []),
    ],
)
def test_versions_are_found_by_whatever_they_say(full, condition, versions):
    assert found(full, condition) == versions


def test_found_versions_come_in_the_order_asked_for(full):
    assert found(full, "step > 0", order_by="top1") == ["cnn@3", "cnn@2", "vit@1", "cnn@1"]
    assert found(full, "step > 0", order_by="lr", ascending=True) == ["cnn@1", "vit@1", "cnn@3", "cnn@2"]
    assert found(full, "step > 0", order_by="tag") == ["cnn@2", "cnn@3", "cnn@1", "vit@1"]


def test_removed_versions_are_found_only_by_who_asks_for_them(full):
    remove(full, ["cnn@1"])
    assert found(full, "name = 'cnn'") == ["cnn@3", "cnn@2"]
    assert found(full, "removed") == ["cnn@1"]
    assert found(full, "removed or name = 'vit'") == ["cnn@1", "vit@1"]


def test_nothing_is_found_where_nothing_is(repository):
    assert found(repository, "top1 > 0.5") == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "at 'its end': expected a field"),
        ("top1 >", "expected a number, or a text in single quotes"),
        ("top1 > 0.5 top1", "at 'top1': expected 'and', 'or' or the end"),
        ("top1 = null", "write 'is null'"),
        ("(top1 > 1", r"expected '\)'"),
        ("top1 ; drop", "at '; drop': this is not valid in a condition"),
        ("top1 = 'x", "this is not valid in a condition"),
        ("top2 > 0.5", "no version has a field 'top2'; similar fields: .*top1"),
        ("step = '7'", "step holds numbers; compare it with a number, without quotes"),
        ("message > 7", "message holds texts; compare it with a text"),
        ("lr like 3", "expected a text"),
        ("name not 3", "expected 'like' or 'in'"),
        ("name is 3", "expected 'null' or 'nan'"),
        ("(" * 99 + "step > 1" + ")" * 99, "may be nested at most 50 deep"),
        ("not " * 99 + "removed", "may be nested at most 50 deep"),
        ("x" * 10_001, "at most 10000"),
    ],
)
def test_what_is_no_condition_shows_where_it_goes_wrong(full, condition, message):
    with pytest.raises(ConfigError, match=message):
        found(full, condition)


def test_a_field_that_is_both_a_metric_and_a_setting_must_be_written_out(repository):
    commit_entry(repository, "m", metrics={"epochs": 3}, config={"epochs": 5})
    with pytest.raises(ConfigError, match=r"metrics\.epochs or config\.epochs"):
        found(repository, "epochs = 3")
    assert found(repository, "config.epochs = 5") == ["m@1"]


def test_a_condition_of_thousands_of_parts_is_evaluated(full):
    assert found(full, " or ".join(["step = 100"] * 700)) == ["cnn@1"]


a_number, a_text = st.integers(-2, 2).map(float), st.sampled_from(["a", "b", ""])
orders = st.sampled_from(["=", "!=", "<", "<=", ">", ">="])
compared = st.one_of(
    *(
        st.builds(Compare, st.just(field), orders, value)
        | st.builds(Within, st.just(field), st.lists(value, min_size=1, max_size=3).map(tuple))
        for field, value in (("n", a_number), ("t", a_text), ("none", a_number | a_text))
    )
)
conditions = st.recursive(
    compared | st.builds(Is, st.sampled_from(["n", "t", "none"]), st.sampled_from(["null", "nan", "true"])),
    lambda inner: (
        st.builds(Not, inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: And(tuple(parts)))
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: Or(tuple(parts)))
    ),
    max_leaves=6,
)
numbers = st.lists(a_number | st.just(math.nan), max_size=2)
texts = st.lists(st.sampled_from("ab"), max_size=2)
tables = st.lists(st.fixed_dictionaries({"n": numbers, "t": texts}), max_size=6)
ORDERS = {"<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__", "=": "__eq__"}


def holds(condition, row):
    """Say of one version in plain Python what `evaluate` says of all at once."""
    if isinstance(condition, Not):
        return not holds(condition.condition, row)
    if isinstance(condition, And | Or):
        return (all if isinstance(condition, And) else any)(holds(each, row) for each in condition.conditions)
    here = row.get(condition.field, [])
    if isinstance(condition, Is):
        tests = {"null": not here, "nan": any(isinstance(v, float) and math.isnan(v) for v in here)}
        return tests.get(condition.what, any(isinstance(v, float) and not math.isnan(v) and v != 0 for v in here))
    if isinstance(condition, Within):
        return any(v == value for v in here for value in condition.values)
    if condition.operator == "!=":
        return bool(here) and not any(v == condition.value for v in here)
    same = [v for v in here if isinstance(v, str) == isinstance(condition.value, str)]
    return any(getattr(v, ORDERS[condition.operator])(condition.value) for v in same)


def columns_of(rows):
    build = {name: [(place, v) for place, row in enumerate(rows) for v in row[name]] for name in ("n", "t")}
    return {name: FieldColumn.build(pairs) for name, pairs in build.items() if pairs}


@given(conditions, tables, st.integers(0, 6))
def test_columns_give_what_each_version_by_itself_gives_however_the_index_grew(condition, rows, cut):
    index = VersionIndex(tuple(IndexPart(len(part), {}, columns_of(part)) for part in (rows[:cut], rows[cut:])))
    stored = decode_index(encode_index(index))
    assert stored.num_rows == len(rows)
    for column in (index.column, stored.columns.get):
        met = evaluate(condition, column, len(rows)).tolist()
        assert met == [holds(condition, row) for row in rows]


def test_a_text_with_quotes_and_a_field_with_quotes_are_read():
    assert parse_expression("""x = 'it''s'""") == Compare("x", "=", "it's")
    assert parse_expression('metrics."a ""b"" and.c" > -1') == Compare('metrics.a "b" and.c', ">", -1.0)


def count_reads(monkeypatch):
    reads = []
    read = Log.read
    monkeypatch.setattr(Log, "read", lambda self, number: reads.append((self.path, number)) or read(self, number))
    return reads


def grow(repository, num_versions, name="m"):
    for step in range(num_versions):
        commit_entry(repository, name, step=step)


def test_a_second_search_reads_the_newest_entry_and_a_third_only_what_is_new(repository, monkeypatch):
    grow(repository, 40)
    assert len(found(repository, "step >= 0")) == 40
    reads = count_reads(monkeypatch)
    assert len(found(repository, "step >= 20")) == 20
    assert reads == [("models/m/versions", 40)]  # whether that is what the index knows
    commit_entry(repository, "m", step=99), commit_entry(repository, "other", step=98)
    reads.clear()
    assert found(repository, "step > 90") == ["m@41", "other@1"]
    assert sorted(reads) == [("models/m/versions", 40), ("models/m/versions", 41), ("models/other/versions", 1)]


def test_tags_that_moved_and_versions_removed_since_are_seen(repository):
    grow(repository, 40)
    repository.tag("models", "m@3", "prod")
    assert found(repository, "tag = 'prod'") == ["m@3"]
    repository.tag("models", "m@4", "prod")
    remove(repository, ["m@3"])
    assert found(repository, "tag = 'prod' or (step = 2 and removed)") == ["m@4", "m@3"]


def test_the_index_is_written_anew_when_many_versions_are_behind_it(repository):
    grow(repository, 40)
    assert read_index(repository).num_rows == 40
    path = Path(repository.url, INDEX_PATH)
    first = path.read_bytes()
    grow(repository, search_index._MAX_BEHIND - 1)
    read_index(repository)
    assert path.read_bytes() == first
    grow(repository, 1)
    read_index(repository)
    assert decode_index(path.read_bytes()).heads["m"].number == 40 + search_index._MAX_BEHIND


@pytest.mark.parametrize("damage", ["lost", "flipped", "cut", "huge", "other models"])
def test_an_index_that_is_damaged_or_of_other_models_is_made_again(repository, damage, tmp_path):
    grow(repository, 40)
    find_versions(repository, "step > 1")
    path = Path(repository.url, INDEX_PATH)
    raw = path.read_bytes()
    if damage == "lost":
        path.unlink()
    elif damage == "huge":
        os.truncate(path, 1 << 40)  # of nothing, but nobody may read it to find out
    elif damage == "other models":
        os.rename(Path(repository.url, "models/m"), Path(repository.url, "models/n"))
    else:
        path.write_bytes(
            raw[: len(raw) // 2]
            + (b"" if damage == "cut" else bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :])
        )
    assert found(repository, "step = 7") == ["n@8" if damage == "other models" else "m@8"]
    assert decode_index(path.read_bytes()).num_rows == 40
    assert (path.read_bytes() == raw) == (damage != "other models")


@pytest.mark.parametrize("num_since", [0, 2, 20])
def test_an_index_that_knows_what_a_backup_does_not_have_is_made_again(repository, tmp_path, num_since):
    grow(repository, 30)
    backup = shutil.copytree(Path(repository.url, "models/m"), tmp_path / "backup")
    grow(repository, 10)
    assert found(repository, "step = 9") == ["m@40", "m@10"]
    shutil.rmtree(Path(repository.url, "models/m"))
    backup.rename(Path(repository.url, "models/m"))
    for _ in range(num_since):
        commit_entry(repository, "m", step=77)
    assert found(repository, "step = 9") == ["m@10"]
    assert len(found(repository, "step = 77")) == num_since


def test_a_search_does_without_an_index_where_it_cannot_be_written(repository, monkeypatch):
    def refuse(self, path, content, **options):
        raise UnavailableError("read-only")

    grow(repository, 40)
    monkeypatch.setattr(Storage, "put_bytes", refuse)
    assert found(repository, "step = 7") == ["m@8"]


def test_progress_tells_how_many_entries_are_read(repository):
    grow(repository, 40)
    progress = RecordedProgress()
    find_versions(repository, "step = 7", progress=progress)
    assert (progress.totals, progress.amounts) == ([40], [32, 8])


def test_versions_of_many_models_on_a_store_that_is_not_local_are_found():
    repository = Repository.create("memory://many-models")
    for number in range(20):
        commit_entry(repository, f"model-{number:02}", step=number)
        commit_entry(repository, f"model-{number:02}", step=100 + number)
    repository.tag("models", "model-03@2", "prod")
    remove(repository, ["model-04@2"])
    for _ in range(2):  # without an index and with one
        assert found(repository, "step > 116") == ["model-17@2", "model-18@2", "model-19@2"]
        assert found(repository, "step in (103, 104) and tag is null or tag = 'prod'") == ["model-03@2"]
