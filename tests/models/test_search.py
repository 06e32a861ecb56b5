import contextlib
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc import sql_sandbox
from datasvc.errors import ConfigError, CorruptDataError, UnavailableError
from datasvc.models.registry.retention import remove
from datasvc.models.search import find_versions, query_versions
from datasvc.models.search import index as search_index
from datasvc.models.search.index import INDEX_PATH, Head, VersionIndex, decode_index, encode_index, read_index
from datasvc.models.search.query import build_table
from datasvc.models.search.rows import build_rows
from datasvc.repository import Entry, Repository
from datasvc.repository.logs.log import Log
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.storage import Storage
from tests.models.entries import commit_entry
from tests.progress import RecordedProgress
from tests.support.confined_sql import check_refused
from tests.support.pages import find_page


@pytest.fixture
def full(repository):
    """Versions of two models that differ in everything that a condition can use."""
    commit_entry(repository, "cnn", step=100, metrics={"top1": 0.5}, config={"lr": 0.1, "net": {"depth": 18}})
    commit_entry(repository, "cnn", step=200, metrics={"top1": 0.8, "loss": "nan"}, parent="cnn@1", data=["pets@3"])
    commit_entry(
        repository, "cnn", step=300, metrics={"top1": 0.9, "val/top-5": 0.99}, parent="cnn@2", merged=["vit@1"],
        data=["pets@3", "imagenet@3"], message="warm restart", code={"revision": "abc", "dirty": True},
    )  # fmt: skip
    commit_entry(repository, "vit", step=400, metrics={"top1": 0.7}, config={"lr": 0.2, "betas": [0.9, 0.95]})
    repository.tag("models", "cnn@2", "prod")
    return repository


def found(repository, condition="true", **options):
    return [str(version) for version in find_versions(repository, condition, **options)]


def test_the_name_of_a_metric_sorts_the_best_first(full):
    commit_entry(full, "vit", step=1, metrics={"it's": 1, "step": 9, "val/loss": 0.2, "reward": 1})
    commit_entry(full, "vit", step=2, metrics={"it's": 2, "step": 8, "val/loss": 0.1})
    assert found(full, by="top1") == ["cnn@3", "cnn@2", "vit@1", "cnn@1", "vit@3", "vit@2"]
    assert found(full, by="val/loss", limit=2) == ["vit@3", "vit@2"]
    assert found(full, "step < 3", by="val/loss", ascending=False) == ["vit@2", "vit@3"]
    assert found(full, by="it's", ascending=True, limit=1) == ["vit@2"]
    assert found(full, by="step", limit=1) == ["vit@1"]  # the column, not the metric
    assert found(full, limit=0) == []
    with pytest.raises(ConfigError, match=r"'reward' does not show .*: give --ascending or --descending"):
        found(full, by="reward")
    with pytest.raises(ConfigError, match="limit=-1"):
        found(full, limit=-1)


def rows_of(repository, sql):
    return query_versions(repository, sql).to_pylist()


# Every condition that could be written before SQL, in SQL.
@pytest.mark.parametrize(
    ("condition", "versions"),
    [
        ("metrics.top1 > 0.75 and 'imagenet@3' in data", ["cnn@3"]),
        ("metrics.top1 >= .7 and step <= 3e2", ["cnn@3", "cnn@2"]),
        ("'pets' in names(data)", ["cnn@3", "cnn@2"]),
        ("data != [] and not 'imagenet' in names(data)", ["cnn@2"]),
        ("data = []", ["cnn@1", "vit@1"]),
        ("'pets' not in names(data)", ["cnn@1", "vit@1"]),
        ("'prod' in tags", ["cnn@2"]),
        ("tags = [] and model = 'cnn'", ["cnn@3", "cnn@1"]),
        ("TAGS = [] and Model = 'cnn'", ["cnn@3", "cnn@1"]),
        ("config.net.depth = 18 or config.lr = 0.2", ["cnn@1", "vit@1"]),
        ("0.95 in config.betas", ["vit@1"]),
        ("'vit' in names(parents)", ["cnn@3"]),
        ("list_has_any(parents, ['cnn@1', 'cnn@2']) and step > 200", ["cnn@3"]),
        ("message like 'warm%' or code.revision like 'ab_'", ["cnn@3"]),
        ("code.dirty", ["cnn@3"]),
        ("not code.dirty and isnan(metrics.loss)", ["cnn@2"]),
        ("metrics.loss is null", ["cnn@3", "cnn@1", "vit@1"]),
        ("metrics.\"val/top-5\" > 0.9 and metrics['val/top-5'] < 1", ["cnn@3"]),
        ("created >= '2020-01-01' and model in ('vit')", ["vit@1"]),
        ("created > now() - interval 1 day and version > 2", ["cnn@3"]),
        ("version = 1 and (model = 'vit' or metrics.top1 not in (0.7))", ["cnn@1", "vit@1"]),
        ("num_nonfinite > 0", []),
        ("message != 'it''s' -- a comment", ["cnn@3", "cnn@2", "cnn@1", "vit@1"]),
    ],
)
def test_a_condition_selects_versions(full, condition, versions):
    assert found(full, condition) == versions


def test_a_condition_may_compare_with_the_other_versions(full):
    assert found(full, "metrics.top1 = (select max(metrics.top1) from versions)") == ["cnn@3"]


@pytest.mark.parametrize(
    "condition",
    [
        "metrics::varchar like '%0.99%'",
        "struct_extract(metrics, 'val' || '/top-5') > 0",
        "metrics['val' || '/top-5'] > 0",
        "(select max(columns('met.*')) from (select metrics.\"val/top-5\" as met)) > 0",
    ],
)
def test_fields_are_read_that_a_condition_does_not_name_literally(full, condition):
    assert found(full, condition) == ["cnn@3"]


def test_versions_are_ordered_by_an_expression_and_those_without_a_value_come_last(full):
    assert found(full, "step > 0", by="metrics.top1") == ["cnn@3", "cnn@2", "vit@1", "cnn@1"]
    assert found(full, "step > 0", by="config.lr", ascending=True) == ["cnn@1", "vit@1", "cnn@3", "cnn@2"]
    assert found(full, "step > 0", by="tags") == ["cnn@2", "cnn@3", "cnn@1", "vit@1"]
    assert found(full, "step > 0", by="-step", ascending=True) == ["vit@1", "cnn@3", "cnn@2", "cnn@1"]


@pytest.mark.parametrize("ascending", [True, False])
def test_a_nan_has_no_place_in_an_order(repository, ascending):
    for loss in (2.0, "nan", 1.0, "inf", None):
        commit_entry(repository, "m", metrics={} if loss is None else {"loss": loss})
    expected = ["m@3", "m@1", "m@4"] if ascending else ["m@4", "m@1", "m@3"]
    assert found(repository, "true", by="metrics.loss", ascending=ascending) == [*expected, "m@2", "m@5"]
    assert found(repository, "metrics.loss < 'inf'::double") == ["m@3", "m@1"]
    assert found(repository, "isnan(metrics.loss)") == ["m@2"]


def test_a_comparison_with_a_missing_value_is_null_and_selects_nothing(full):
    assert found(full, "config.lr > 0.1 or not config.lr > 0.1") == ["cnn@1", "vit@1"]
    assert found(full, "metrics.loss != 3") == ["cnn@2"]
    assert found(full, "config.betas is null") == ["cnn@3", "cnn@2", "cnn@1"]


def test_removed_versions_are_found_only_on_request(full):
    remove(full, ["cnn@1"])
    assert found(full, "model = 'cnn'") == ["cnn@3", "cnn@2"]
    assert found(full, "removed", removed=True) == ["cnn@1"]
    assert found(full, "removed or model = 'vit'", removed=True) == ["cnn@1", "vit@1"]
    with pytest.raises(ConfigError, match=r'"removed" not found(.|\n)*Only all_versions'):
        found(full, "removed")
    assert rows_of(full, "select count(*) n from versions") == [{"n": 3}]
    assert rows_of(full, "select version from all_versions where removed") == [{"version": 1}]


def test_nothing_is_found_in_an_empty_repository(repository):
    assert found(repository, "metrics.top1 > 0.5") == []
    assert rows_of(repository, "from versions") == []
    assert rows_of(repository, "select metrics['top1'] from versions") == []


def test_a_query_sees_all_fields_of_an_entry(repository):
    uses = [
        {"dataset": "pets@3", "split": "train", "state": {"epoch": 4, "position": 7}},
        {"dataset": "a@1, b@2", "split": "mixture", "state": {"epoch": 2}},
        {"dataset": "pets@1", "split": "val", "state": {"epoch": 9}, "purpose": "evaluation"},
    ]
    commit_entry(
        repository, "m", step=5, metrics={"loss": 0.25},
        config={"lr": 1, "amp": True, "layers": [{"n": 1}, {"n": 2}]}, data=(),
        parent="x@1", merged=["y@2"], message="hi", num_nonfinite={"w": 2, "b": 1}, bytes=7, stored_bytes=5,
        environment={"python": "3.11"}, num_tensors=2, code={"revision": None, "dirty": False, "remote": "u"},
        execution={"layout": {"data": 2}, "consistency": "synchronous"}, modules={"Linear": 3}, ops={"linear": 4},
    )  # fmt: skip
    repository.tag("models", "m@1", "prod")
    repository.tag("models", "m@1", "best")
    (row,) = rows_of(repository, "from versions")
    assert row.pop("created").year > 2000
    assert row == {
        "model": "m", "version": 1, "tags": ["best", "prod"], "step": 5, "epoch": None, "message": "hi",
        "metrics": {"loss": 0.25}, "config": {"amp": True, "layers": {"n": [1.0, 2.0]}, "lr": 1.0},
        "environment": {"python": "3.11"}, "execution": {"consistency": "synchronous", "layout": {"data": 2.0}},
        "modules": {"Linear": 3.0}, "ops": {"linear": 4.0},
        "code": {"dirty": False, "remote": "u", "revision": None},
        "data": [], "evaluation": [], "parents": ["x@1", "y@2"],
        "size_bytes": 7, "stored_bytes": 5, "num_tensors": 2, "num_nonfinite": 3,
    }  # fmt: skip
    repository.versions("models", "m").append(lambda _head: {"step": 6, "data": uses})
    (row,) = rows_of(repository, "select data, evaluation, epoch, metrics.loss from versions where step = 6")
    assert row == {"data": ["pets@3", "a@1", "b@2"], "evaluation": ["pets@1"], "epoch": 4, "loss": None}


def test_the_guide_lists_every_column_with_its_type(repository):
    execution = {"layout": {"data": 2}}
    commit_entry(
        repository, "m", metrics={"loss": 1.0}, config={"lr": 1}, environment={"python": "3"}, execution=execution,
        modules={"Linear": 1}, ops={"linear": 1},
    )  # fmt: skip
    guide = find_page("registry.md").read_text()
    for column in rows_of(repository, "describe all_versions"):
        kind = column["column_type"].partition("(")[0]
        assert f"| `{column['column_name']}` | {kind} |" in guide


def test_values_of_several_kinds_under_one_name_get_names_of_their_own(repository):
    for lr in (0.1, "auto", True, [1, 2], ["a"], {"base": 3}):
        commit_entry(repository, "m", config={"lr": lr})
    assert rows_of(repository, "select config from versions limit 1")[0]["config"].keys() == {
        "lr", "lr_boolean", "lr_text", "lr_number_list", "lr_text_list", "lr_struct"
    }  # fmt: skip
    assert found(repository, "config.lr > 0") == ["m@1"]
    assert found(repository, "config.lr_text = 'auto' or config.lr_boolean") == ["m@3", "m@2"]
    assert found(repository, "2 in config.lr_number_list or config.lr_struct.base = 3") == ["m@6", "m@4"]


odd_names = [
    "Top1",
    "top1",
    "top1_number",
    "",
    " ",
    "a.b",
    'q"uote',
    "it's",
    "ünï",
    "a\0b",
    "a\ufffdb",
    "select",
    "x\ny",
]


def test_names_with_odd_characters_are_columns(repository):
    commit_entry(repository, "m", metrics={name: float(place) for place, name in enumerate(odd_names)})
    (row,) = rows_of(repository, "select metrics from versions")
    assert sorted(row["metrics"].values()) == [float(place) for place in range(len(odd_names))]
    condition = (
        'metrics."q""uote" = 6 and metrics[\'it\'\'s\'] = 7 and metrics.ünï = 8 and metrics."a.b" = 5 '
        'and metrics."select" = 11 and metrics.top1_number = 2 and metrics._ = 3'
    )
    assert found(repository, condition) == ["m@1"]


def test_texts_with_quotes_and_other_odd_characters_are_compared(repository):
    for message in ("it's", 'say "hi"', "a\0b", "new\nline", "; drop view versions; --"):
        commit_entry(repository, "m", message=message, config={"name": message})
    assert found(repository, "message = 'it''s' and config.name = 'it''s'") == ["m@1"]
    assert found(repository, "message like '%\"hi\"'") == ["m@2"]
    assert found(repository, "message = 'a' || chr(0) || 'b'") == ["m@3"]
    assert found(repository, "config.name = '; drop view versions; --'") == ["m@5"]


def test_an_entry_with_other_types_than_expected_is_still_found(repository):
    repository.versions("models", "m").append(
        lambda _head: {
            "step": "x", "message": 7, "bytes": 1 << 70, "data": "pets", "code": 3, "created": "soon",
            "metrics": {"a": [1], "b": {"c": "d"}}, "config": [1, {"deep": {}}], "num_nonfinite": {"w": "x"},
            "environment": {"big": 1 << 2000}, "parent": 5, "merged": 6,
        }
    )  # fmt: skip
    commit_entry(repository, "m", step=3)
    assert found(repository, "step is null and size_bytes is null and message is null") == ["m@1"]
    assert found(repository, "step = 3 and created is not null") == ["m@2"]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "cannot be evaluated"),
        ("step, version", "TUPLE"),
        ("metrics.top1 >", "syntax error"),
        ("metrics.top1 > 0.5 metrics", "syntax error"),
        ("metrics.top1 > 0.5; drop view versions", "syntax error"),
        ("true) union select ('x'", "modifiers"),
        ("true) order by (step", "modifiers"),
        ("(step > 1", "syntax error"),
        ("metrics.top2 > 0.5", r'Could not find key "top2" in struct(.|\n)*"top1"(.|\n)*columns are model, version'),
        ("metric.top1 > 0.5", r'"metric" not found(.|\n)*columns are model, version, created, tags'),
        ("stepp > 3", r'"stepp" not found(.|\n)*"step"(.|\n)*columns are model, version'),
        ("step = 'x'", "Could not convert string 'x'"),
        ("data = 'pets@3'", r"VARCHAR\[\](.|\n)*'pets@3' in data"),
        ("message", "BOOL"),
        ("exists (select 1 from read_csv('/etc/passwd'))", "disabled by configuration"),
        ("exists (select 1 from '/etc/passwd')", "disabled by configuration|does not exist"),
        ("exists (select 1 from leaked)", "leaked does not exist"),
        ("exists (copy versions to '/tmp/x')", "syntax error"),
        ("(" * 5000 + "step > 1" + ")" * 5000, "depth"),
        ("not " * 5000 + "code.dirty", "depth"),
    ],
)
def test_a_condition_that_is_not_valid_is_refused_with_the_reason(full, monkeypatch, condition, message):
    monkeypatch.setattr("datasvc.models.search.query.leaked", pa.table({"x": [1]}), raising=False)
    with pytest.raises(ConfigError, match=message):
        found(full, condition)


def test_an_order_that_is_not_valid_is_refused(full):
    with pytest.raises(ConfigError, match='"nothing" not found'):
        found(full, "true", by="nothing")
    with pytest.raises(ConfigError, match="syntax error"):
        found(full, "true", by="step; drop view versions")


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{file}')",
        "select * from '{file}'",
        "select * from read_csv('https://example.org/x.csv')",
        "select * from glob('/*')",
        "copy (select 1) to '{file}'",
        "copy versions to '{file}'",
        "copy versions from '{file}'",
        "export database '{file}.d'",
        "import database '{file}.d'",
        "attach '{file}'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "set memory_limit = '1TB'",
        "reset memory_limit",
        "pragma threads = 4",
        "pragma database_list",
        "create table mine (x int)",
        "create or replace temp view versions as select 1",
        "insert into versions values ('x')",
        "update version_index set step = 1",
        "delete from version_index",
        "drop view versions",
        "alter view versions rename to v",
        "begin",
        "call pragma_version()",
        "prepare x as select 1",
        "select * from secret_of_this_program",
        "select 1; select 2",
        "",
        "-- nothing",
    ],
)
def test_a_query_reaches_nothing_but_the_versions_and_changes_nothing(full, tmp_path, sql):
    check_refused(lambda statement: query_versions(full, statement), sql, tmp_path)


def test_a_query_groups_joins_and_explains(full):
    assert rows_of(full, "select model, max(metrics.top1) best from versions group by model order by model") == [
        {"model": "cnn", "best": 0.9},
        {"model": "vit", "best": 0.7},
    ]
    assert rows_of(full, "select unnest(names(data)) d, count(*) n from versions group by d order by d") == [
        {"d": "imagenet", "n": 1},
        {"d": "pets", "n": 2},
    ]
    assert rows_of(full, "explain from versions")


def test_an_error_in_a_query_has_the_line_and_the_columns(full):
    with pytest.raises(ConfigError, match=r"LINE 1: select model frm versions(.|\n)*columns are model, version"):
        query_versions(full, "select model frm versions")
    with pytest.raises(ConfigError, match="is not a single query; expected one, such as 'select"):
        query_versions(full, "select 1; select 2")


def test_a_query_that_needs_too_much_memory_is_refused(full, monkeypatch):
    monkeypatch.setitem(sql_sandbox._SETTINGS, "memory_limit", "20MB")
    with pytest.raises(ConfigError, match="Out of Memory"):
        query_versions(full, "select list(range) from range(10000000)")
    with pytest.raises(ConfigError, match="Out of Memory"):
        found(full, "(select len(list(range)) from range(10000000)) > 3")


def test_a_condition_of_thousands_of_parts_is_evaluated(full):
    assert found(full, " or ".join(["step = 100"] * 700)) == ["cnn@1"]


values = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-1, 1) | st.sampled_from(["a", "b", ""])
trees = st.recursive(
    values | st.lists(values, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from(["a", "A", "b", "a_text"]), inner, max_size=3),
    max_leaves=6,
)
entries = st.lists(st.fixed_dictionaries({"config": st.dictionaries(st.sampled_from(["x", "y"]), trees)}), max_size=6)


def leaves(value):
    """Return all numbers and texts in a value, in order of their text."""
    if isinstance(value, dict | list):
        return sorted(
            leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in leaves(item)
        )
    return [] if value is None else [repr(value) if isinstance(value, str) else repr(float(value))]


@given(entries, st.integers(0, 6))
def test_no_value_is_lost_in_the_structs_however_the_index_grew(contents, cut):
    versions = [("m", Entry(number, content)) for number, content in enumerate(contents, 1)]
    fields = {}
    parts = [build_rows(part, fields) for part in (versions[:cut], versions[cut:])]
    index = VersionIndex(pa.concat_tables(parts), list(fields), {})
    for read in (index, decode_index(encode_index(index))):
        rows = build_table(read).to_pylist()
        assert [row["version"] for row in rows] == [entry.number for _, entry in versions]
        assert [leaves(row["config"] or {}) for row in rows] == [leaves(content["config"]) for content in contents]


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


def test_a_repository_that_is_opened_read_only_keeps_its_index_in_memory(repository, monkeypatch):
    grow(repository, 40)
    shown = Repository.open(repository.url, read_only=True)
    assert len(found(shown, "step >= 0")) == 40
    assert not Path(repository.url, INDEX_PATH).exists()
    reads = count_reads(monkeypatch)
    assert len(found(shown, "step >= 20")) == 20
    assert reads == [("models/m/versions", 40)]


def test_tags_that_moved_and_versions_removed_since_are_seen(repository):
    grow(repository, 40)
    repository.tag("models", "m@3", "prod")
    assert found(repository, "'prod' in tags") == ["m@3"]
    repository.tag("models", "m@4", "prod")
    remove(repository, ["m@3"])
    assert found(repository, "'prod' in tags or (step = 2 and removed)", removed=True) == ["m@4", "m@3"]


def test_the_index_is_written_anew_when_many_versions_are_behind_it(repository):
    grow(repository, 40)
    assert read_index(repository).table.num_rows == 40
    path = Path(repository.url, INDEX_PATH)
    first = path.read_bytes()
    grow(repository, search_index._MAX_MISSING - 1)
    read_index(repository)
    assert path.read_bytes() == first
    grow(repository, 1)
    read_index(repository)
    assert decode_index(path.read_bytes()).heads["m"].number == 40 + search_index._MAX_MISSING


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
    assert decode_index(path.read_bytes()).table.num_rows == 40
    assert (path.read_bytes() == raw) == (damage != "other models")


def sealed(content):
    return digest_of(content).encode() + content


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_an_index_with_a_right_digest_and_wrong_bytes_is_read_or_refused(random, num_changes):
    versions = [("m", Entry(n, {"step": n, "config": {"lr": 0.1, "name": f"x{n}", "l": [1, n]}})) for n in range(9)]
    fields = {}
    index = VersionIndex(build_rows(versions, fields), list(fields), {"m": Head(8, "c")})
    content = bytearray(encode_index(index)[64:])
    for _ in range(num_changes):
        content[random.randrange(len(content))] = random.randrange(256)
    with contextlib.suppress(CorruptDataError):
        build_table(decode_index(sealed(bytes(content))))


@pytest.mark.parametrize("wrong", ["field", "kind", "path", "depth", "tree", "null", "model"])
def test_an_index_that_refers_to_nothing_is_made_again(repository, wrong):
    grow(repository, 40)
    index = read_index(repository)
    table, fields = index.table, list(index.fields)
    first = fields[0]
    changes = {
        "field": (table, []),
        "kind": (table, [first._replace(kind="date"), *fields[1:]]),
        "path": (table, [first._replace(path=(first.path[0], 3)), *fields[1:]]),
        "depth": (table, [first._replace(path=(first.path[0], *"a" * 2000)), *fields[1:]]),
        "tree": (table, [first._replace(path=("files", "a")), *fields[1:]]),
        "null": (table.set_column(1, "version", pa.nulls(40, pa.int64())), fields),
        "model": (table.set_column(0, "model", pa.array(["../m"] * 40)), fields),
    }
    changed = VersionIndex(*changes[wrong], index.heads)
    path = Path(repository.url, INDEX_PATH)
    raw = path.read_bytes()
    path.write_bytes(encode_index(changed))
    assert found(repository, "step = 7") == ["m@8"]
    assert path.read_bytes() == raw


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
        assert found(repository, "step in (103, 104) and tags = [] or 'prod' in tags") == ["model-03@2"]
