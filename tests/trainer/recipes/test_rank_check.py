"""What a job whose ranks differ is refused with. Whole jobs: tests/distributed/test_differing_ranks.py."""

import os
import subprocess

from datasvc.models.versions.code_revision import identify_code
from datasvc.trainer.recipes.rank_check import describe_difference

DATED = {**os.environ, "GIT_COMMITTER_DATE": "2026-01-01T00:00Z"}


def test_the_message_has_the_first_difference_with_ranks_and_values_and_the_names_of_the_others():
    ranks = [{"seed": 0, "batch_size": 32, "name": "a"}, {"seed": 0, "batch_size": 16, "name": "b"}]
    assert describe_difference([ranks[0], ranks[0], ranks[1], ranks[0]]) == (
        "the ranks of this job differ in batch_size: ranks 0 to 1, 3 have 32, rank 2 has 16; they also differ in "
        "name. Start all ranks with the same options, configuration file, variables, code and data"
    )
    assert describe_difference([ranks[0]] * 3) is None


def test_ranks_without_a_fact_differ_from_none():
    assert describe_difference([{"code": "a"}, {}, {"code": "a"}]) is None
    assert 'rank 0 has "a", rank 2 has "b"' in describe_difference([{"code": "a"}, {}, {"code": "b"}])


def test_of_many_values_some_are_shown():
    message = describe_difference([{"seed": rank} for rank in range(1000)] + [{"seed": "x" * 1000}])
    assert "rank 2 has 2, others have 998 more values. Start" in message
    assert len(message) < 300


def test_the_code_of_a_folder_is_its_commit_with_its_local_changes(tmp_path):
    assert identify_code(tmp_path) is None
    texts = []
    for name, content in (("first", "1"), ("second", "2"), ("third", "2")):
        folder = tmp_path / name  # another folder each time: a process reads the code of a folder once
        git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a"]
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        (folder / "train.py").write_text("1")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "x", "--date=2026-01-01T00:00Z"], check=True, env=DATED)
        (folder / "train.py").write_text(content)
        if name == "third":
            for setting in ("core.abbrev=40", "diff.context=9", "diff.algorithm=patience"):
                subprocess.run([*git, "config", *setting.split("=")], check=True)
        texts.append(identify_code(folder))
    assert "changes" not in texts[0]
    assert texts[1].startswith(f"{texts[0]} with local changes ")
    assert texts[2] == texts[1]
