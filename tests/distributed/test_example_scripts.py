"""The programs in examples/, on small data: people begin with these."""

import json
import re
from pathlib import Path

import pytest

from datasvc.repository import Repository
from datasvc.shards import ingest
from datasvc.shards.sources import SourceOptions
from tests.shards.sources.text.test_tokens import TEXTS, train
from tests.support import warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(output):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.fixture
def run_example(launcher):
    def run(name, *arguments, options=(), num_ranks=2):
        done = launcher.run(num_ranks, warm_python.command(), EXAMPLES / name, *map(str, arguments), options=options)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce"], ["--use-adasum"]])
def test_a_script_written_for_horovod_learns_digits(run_example, options):
    output = run_example("horovod_mnist.py", "--epochs", "3", *options)
    first, _, last = losses(output)
    assert last < first
    assert "[1] Test set" not in output


@pytest.mark.slow
def test_the_imagenet_loop_commits_each_epoch_and_continues_from_there(run_example, digits_folder, tmp_path):
    url = str(tmp_path / "repo")
    ingest(Repository.create(url), str(digits_folder), "digits", limit=96)
    words = ["--repo", url, "--data", "digits@1", "--model", "resnet18", "--size", "32", "--batch-size", "16"]
    first = run_example("imagenet_resnet50.py", *words, "--epochs", "1")
    assert re.search(r"epoch 0: loss \d", first)
    second = run_example("imagenet_resnet50.py", *words, "--epochs", "2")
    assert "epoch 0" not in second
    assert "imagenet-resnet50@2" in second


@pytest.mark.slow
def test_a_detector_finds_the_boxes_of_its_scenes_at_two_ranks(run_example, tmp_path):
    pytest.importorskip("pycocotools")
    output = run_example("detection.py", tmp_path / "repo", "--epochs", "24")
    assert float(re.search(r"AP50 (\S+) on 2 ranks", output)[1]) > 0.9


@pytest.mark.slow
def test_a_gpt_learns_from_packed_blocks(run_example, tmp_path):
    tokenizer = train(tmp_path / "tokenizer.json")
    source = tmp_path / "text" / "train"
    source.mkdir(parents=True)
    (source / "lines.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS * 20))
    url = str(tmp_path / "repo")
    options = SourceOptions(tokenizer=str(tmp_path / "tokenizer.json"), block_tokens=32)
    ingest(Repository.create(url), str(source), "text", source_options=options)
    shape = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "32"]
    words = ["--repo", url, "--data", "text@1", "--vocabulary", tokenizer.get_vocab_size(), "--batch-size", "4"]
    first, *_, last = losses(run_example("gpt_tokens.py", *words, *shape, "--epochs", "3", "--lr", "1e-2"))
    assert last < 0.7 * first


@pytest.fixture
def small_url(digits_folder, tmp_path):
    """A repository with 96 digits to train on."""
    url = str(tmp_path / "repo")
    ingest(Repository.create(url), str(digits_folder), "digits", limit=96)
    return url


@pytest.mark.slow
def test_elastic_training_runs_on_two_hosts_and_continues_from_its_newest_version(run_example, small_url, tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    words = ["--repo", small_url, "--data", "digits@1", "--global-batch-size", "16"]
    options = ["--host-discovery-script", str(hosts), "--min-num-proc", "2"]
    first = run_example("elastic_training.py", *words, "--epochs", "2", options=options)
    assert "step 0 from memory, 2 ranks" in first
    assert re.search(r"epoch 2: step 12, 2 ranks", first)
    second = run_example("elastic_training.py", *words, "--epochs", "3", options=options)
    assert "step 12 from repository, 2 ranks" in second
    assert re.search(r"epoch 3: step 18, 2 ranks", second)
    assert "epoch 2" not in second


@pytest.mark.slow
def test_a_rank_that_joins_an_elastic_training_gets_the_state_from_memory_and_the_history_is_one_run(
    launcher, small_url, tmp_path
):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    launcher.environ["HVD_DISCOVERY_INTERVAL"] = "0.1"
    words = ["--repo", small_url, "--data", "digits@1", "--global-batch-size", "16", "--epochs", "1000"]
    process = launcher.start(
        1,
        *(warm_python.command(), EXAMPLES / "elastic_training.py", *words, "--save-every", "6"),
        options=["--min-num-proc", "1", "--host-discovery-script", f"cat {hosts}"],
    )
    output = []

    def read_until(pattern):
        while not re.search(pattern, line := process.stdout.readline()):
            assert line, f"{''.join(output)}\n{process.stderr.read()}"
            output.append(line)
        return line

    # At the third save there is room for one of the two before: it is committed.
    read_until(r"epoch 3: step 18, 1 ranks")
    (tmp_path / "new").write_text("localhost:2\n")
    (tmp_path / "new").replace(hosts)
    joined = int(re.search(r"step (\d+) from memory, 2 ranks", read_until(r"from \w+, 2 ranks"))[1])
    reached = joined  # in the middle of an epoch, perhaps: steps are said at the ends of epochs
    while reached < joined + 18:
        reached = int(re.search(r"step (\d+), 2 ranks", read_until(r"step \d+, 2 ranks"))[1])
    process.kill()
    process.communicate()
    entries = [entry.content for entry in Repository.open(small_url).entries("models", "elastic")]
    assert entries[-1]["step"] > joined
    assert [entry["parent"] for entry in entries] == [None, *(f"elastic@{n}" for n in range(1, len(entries)))]
    assert len({entry["data"][0]["run"] for entry in entries}) == 1
    spans = [span for span in entries[-1]["data"][0]["spans"] if span["start"] != span["stop"]]
    assert [(span["step"], span["global_batch"]) for span in spans] == [(0, 16), (joined, 16)]
    assert spans[0]["stop"] == spans[1]["start"]
