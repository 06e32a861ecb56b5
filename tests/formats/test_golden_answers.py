"""Every `--json` of the command line, and every answer of `/v1` and `/api`, field by field.

The files in `golden/answers/` are what programs of users read: a field may be added, none renamed or removed. What
differs between two runs or machines is replaced there. After a change of an answer that is meant, write them again:
`DATASVC_WRITE_ANSWERS=1 python -m pytest tests/formats/test_golden_answers.py`, and read the difference.
"""

import asyncio
import json
import os
import re
import shlex
import struct
import urllib.request
import zlib
from pathlib import Path

import pytest
import torch
import typer

import datasvc
from datasvc.cli.main import make_app
from datasvc.doctor.finding import Finding
from datasvc.models import ConsumptionTracker
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.node import server as node_server
from datasvc.runs import RunLog
from datasvc.runs.resources import ResourceMeter
from datasvc.ui import server as ui_server
from datasvc.ui.settings import UiSettings
from datasvc.ui.web.node_monitor import NodeMonitor
from datasvc.ui.web.site import Site
from tests.cli.command import run
from tests.loaders.echo import EchoLoader, write_numbers
from tests.node.conftest import RunningNode
from tests.samples import write_tars
from tests.shards.written_versions import LABELLED_SCHEMA, write_version
from tests.ui.conftest import running_ui

ANSWERS = Path(__file__).parent / "golden" / "answers"
WRITE = "DATASVC_WRITE_ANSWERS"
RUN = "20261123-221830-3fa9c1"

# Lines of `NAME: COMMAND`, which run in this order. A name has the words of its command with dots, and may go on with
# what is special. {w} is a folder.
COMMANDS = dict(line.split(": ", 1) for line in (ANSWERS / "commands.txt").read_text(encoding="utf-8").splitlines())

# Values of the addresses, by the name in the route.
PARTS = {
    "ref": "net@2", "old": "pets@1", "new": "pets@5", "split": "train", "position": "1", "column": "image",
    "ledger": "good", "a": "net@1", "b": "net@2", "name": "net", "version": "2", "tag": "prod", "id": RUN,
    "signal": "loss",
}  # fmt: skip
QUERIES = {
    "/api/search": "q=pets",
    "/api/planner": "ref=numbers@1",
    "/api/runs/compare": f"run=net/{RUN}&run=net/{RUN}",
    "/v1/datasets/{name}/consumers": "key=4",
}
# Texts that differ between runs. Times are not numbered: two of one second are equal.
CHANGING = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\+00:00| UTC)?|(?:\d:\d:)?\b\d{10}\.\d+)"
    r"|(?P<digest>(?:\b[0-9a-f]{2}/)?\b[0-9a-f]{64}\b)|(?P<random>\b(?:\d+-)?(?:[0-9a-f]{32}|[0-9a-f]{16})\b)"
    r"|(?P<address>http://127\.0\.0\.1:\d+)"
)
CHANGING_FIELDS = {
    "seconds", "up_s", "last_s", "time", "times", "started", "pid", "process", "free_disk_bytes", "disk_bytes",
    "disk", "step_interval_s", "idle_s", "bytes_s", "python", "package", "code", "environment", "host", "audited_at",
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the answers by the name of their file, from one repository, which the commands fill in their order."""
    folder = tmp_path_factory.mktemp("answers")
    with pytest.MonkeyPatch.context() as patch:
        for module in (node_server, ui_server):
            patch.setattr(module, "serve", lambda settings, ready: ready("http://127.0.0.1:1") or True)
        patch.setattr("datasvc.shards.ingestion.executors.keep_lean", lambda: None)
        patch.setattr("datasvc.doctor.examine", lambda **_: [Finding("disk", "problem", "is full", "clean it up")])
        patch.setattr(ResourceMeter, "read", lambda self: {})
        patch.setattr("datasvc.repository.logs.copies.user_and_host", lambda: "ann@host")
        # Not that of this checkout: local changes would be one more object.
        patch.setattr(
            "datasvc.models.versions.code_revision._capture", lambda _: (CodeRevision("0" * 40, False), b"")
        )
        repo = fill(folder)
        answers = {f"cli/{name}": answer_of_command(folder, words) for name, words in COMMANDS.items()}
        PARTS["certificate"] = repo.datasets.list_certificates("secret")[0]["certificate"]
        # The page reads each node once, when it is asked first, so there is no history that grows with time.
        patch.setattr(NodeMonitor, "run", lambda self: asyncio.sleep(3600))
        node = RunningNode(folder=folder / "cache", repositories=(repo.repository.url,))
        with running_ui(repo.repository.url, nodes=(node.url,), ledgers=folder / "ledgers") as server:
            for route in addresses():
                answers[file_of(route)] = answer_of_route(server.url, route)
        node.stop()
    replaced = {name: replace(answer, folder) for name, answer in answers.items()}
    if WRITE in os.environ:
        for name, answer in replaced.items():
            path = ANSWERS / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(answer, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return replaced


def fill(folder):
    """Write the folders that commands read, a data set without images, and a model that was trained on it."""
    for number in range(7):
        place = folder / ["source", "more", "secret"][max(0, number - 4)] / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(picture(number))
    (folder / "source/train/a/bad.png").write_bytes(b"no picture")
    write_tars(folder / "wds", {"0.png": picture(0), "0.cls": b"0"}, per_tar=2)
    (folder / "classes").write_text("a\nb\nc\n")
    (folder / "labels.csv").write_text("key,label\na/0.png,b\nmissing,a\n")
    repo = datasvc.open(str(folder / "repo"), create=True)
    write_numbers(repo.repository, [5, 3])
    for name in ("good", "lost"):
        for rank in range(2):
            options = {"batch_size": 2, "rank": rank, "world_size": 2, "ledger": folder / "ledgers" / name}
            with EchoLoader(repo.dataset("numbers")["train"], **options) as loader:
                reading = ConsumptionTracker(loader)
                list(loader)
                use = reading.use()
    next((folder / "ledgers/lost").glob("*-rank1-of-*")).unlink()
    with RunLog.open(repo.repository, "net", run_id=RUN, config={"rate": 0.5}, data=["numbers@1"]) as log:
        for step in (1, 2, 3):
            state = {"model": {"w": torch.full((2, 3), float(step)), "b": torch.zeros(3)}}
            metrics = {"accuracy": step / 4, "loss": 1 / step}
            repo.models.save("net", state, step=step, data=[use], config={"rate": 1 / step}, metrics=metrics)
            log.report("step", step=step, loss=1 / step, step_s=0.5, wait_s=0.25)
            log.report("checkpoint", step=step, version=f"net@{step}")
    with RunLog.open(repo.repository, "falling", run_id=RUN) as log:
        for step in range(1, 41):
            log.report("step", step=step, loss=1 / step)
    with EchoLoader(repo.dataset("numbers")["train"], batch_size=4) as loader:
        repo.runs.record(f"net/{RUN}", loader)
        for batch in loader:
            loader.record(batch, batch.positions.astype("float32"))
    damage(repo, folder / "repo")
    return repo


def damage(repo, root):
    """Add a data set that has lost the bytes of its shard, and versions whose entries are no JSON."""
    for name in ("torn", "lost"):
        write_version(
            repo.repository, name, {"train": [[{"key": "0", "blob": b"torn", "label": 0}]]}, LABELLED_SCHEMA
        )
    repo.models.save("gone", {"w": torch.zeros(1)}, step=1)
    for name in ("datasets/lost", "models/gone"):
        (root / name / "versions" / "00000001.json").write_text("no JSON")
    (info,) = repo.dataset("torn")["train"].table.shards()
    shard = next((root / "objects").rglob(info.digest))
    shard.chmod(0o600)
    shard.write_bytes(bytes(info.size_bytes))


def picture(number):
    """Return a grey PNG whose bytes do not depend on the release of a library."""
    size = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes([40 * number] * 8)) * 8, 0)
    parts = ((b"IHDR", size), (b"IDAT", rows), (b"IEND", b""))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def answer_of_command(folder, words):
    done = run(
        *shlex.split(words.format(w=folder)), "--json", DATASVC_REPO=folder / "repo", DATASVC_CACHE=folder / "cache"
    )
    try:
        printed = json.loads(done.stdout)
    except ValueError:
        # One of each event: a slow machine reports its progress more often.
        printed = {event["event"]: event for event in map(json.loads, done.stdout.splitlines())}
    return {"status": done.returncode, "json": printed}


def addresses():
    """Return the paths of all routes for programs."""
    routes = ui_server.make_app(Site(UiSettings(repository=""))).router.resources()
    return sorted({route.canonical for route in routes if re.match("/(api|v1)(/|$)", route.canonical)})


def file_of(route):
    return route.strip("/").replace("/", "-").replace("-", "/", 1)


def answer_of_route(url, route):
    parts = dict(PARTS)
    if "certificate" in route:
        parts["ref"] = "secret"
    elif "/datasets" in route:
        parts |= {"ref": "pets@1", "name": "numbers", "version": "1"}
    query = QUERIES.get(route)
    address = url + route.format(**parts) + (f"?{query}" if query else "")
    try:
        response = urllib.request.urlopen(address)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        kind = response.headers.get_content_type()
        body = b"".join(iter(response.readline, b"\n")) if kind == "text/event-stream" else response.read()
    shown = json.loads(body) if kind.endswith("json") else body.decode() if kind.startswith("text") else None
    return {"status": response.status, "type": kind, "body": shown}


def replace(answer, folder):
    """Return an answer with what differs between runs replaced, texts by their number in the order of appearance."""
    seen = {}

    def text(found):
        kind = found.lastgroup
        if kind == "time":  # versions of one second have the same
            return "<time>"
        number = 1 + sum(kind == other for other, _ in seen)
        return f"<{kind} {seen.setdefault((kind, found[0].rpartition('/')[2]), number)}>"

    def walk(value, name=""):
        if name in CHANGING_FIELDS:
            return f"<{name}>"
        if isinstance(value, dict):
            return {text_of(key): walk(each, key) for key, each in value.items()}
        if isinstance(value, list):
            if value and all(isinstance(each, dict) and "digest" in each for each in value):
                value = sorted(value, key=lambda each: each.get("size_bytes", 0))  # some digests are of random bytes
            return [walk(each, name) for each in value]
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, float):
            return float(f"{value:.9g}")
        return value

    def text_of(value):
        if value == datasvc.__version__:
            return "<release>"
        return CHANGING.sub(text, value.replace(str(folder), "<folder>"))

    return walk(answer)


NAMES = (*(f"cli/{name}" for name in COMMANDS), *map(file_of, addresses()))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_stays_as_it_is(answers, name):
    assert answers[name] == json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_command_with_json_has_an_answer():
    def commands(command, path=()):
        for name, each in getattr(command, "commands", {}).items():
            yield from commands(each, (*path, name))
        if any("--json" in option.opts for option in command.params):
            yield ".".join(path)

    missing = {name for name in commands(typer.main.get_command(make_app())) if name not in COMMANDS}
    assert not missing
    assert {path.relative_to(ANSWERS).with_suffix("").as_posix() for path in ANSWERS.rglob("*.json")} == set(NAMES)
