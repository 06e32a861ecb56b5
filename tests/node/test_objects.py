"""Objects over HTTP: what a peer gets, whole, in part, or not at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects.objects import digest_of
from tests.node.conftest import OBJECT_BYTES


def test_a_resident_object_comes_whole(node, origin):
    _, infos, contents = origin
    answer = node.get_object(infos[0])
    assert (answer.status, answer.body) == (200, contents[0])
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["ETag"] == f'"{infos[0].digest}"'


def test_a_range_continues_what_broke_off(node, origin):
    _, infos, contents = origin
    answer = node.get_object(infos[1], Range="bytes=70000-")
    assert (answer.status, answer.body) == (206, contents[1][70000:])
    assert answer.headers["Content-Range"] == f"bytes 70000-{OBJECT_BYTES - 1}/{OBJECT_BYTES}"
    assert node.get_object(infos[1], Range="bytes=5-9").body == contents[1][5:10]
    assert node.get_object(infos[1], Range="bytes=-7").body == contents[1][-7:]


def test_a_range_behind_the_end_is_refused_with_the_size(node, origin):
    answer = node.get_object(origin[1][0], Range=f"bytes={OBJECT_BYTES}-")
    assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{OBJECT_BYTES}")


def test_a_range_of_another_object_gives_the_whole(node, origin):
    _, infos, _ = origin
    ranged = {"Range": "bytes=5-9"}
    assert node.get_object(infos[0], **ranged, If_Range=f'"{infos[0].digest}"').status == 206
    assert node.get_object(infos[0], **ranged, If_Range='"something else"').status == 200


def test_head_tells_the_size_of_what_is_resident_and_fetches_nothing(node, origin):
    repository, infos, _ = origin
    answer = node.ask("HEAD", f"/objects/{infos[0].digest}")
    assert (answer.status, answer.headers["Content-Length"], answer.body) == (200, str(OBJECT_BYTES), b"")
    query = f"?origin={repository.url}&size={OBJECT_BYTES}"
    assert node.ask("HEAD", f"/objects/{infos[3].digest}{query}").status == 404
    assert node.get("/status").json["cache"]["num_resident"] == 2


def test_an_object_that_a_reader_found_wrong_is_looked_at_and_put_away(node, origin):
    repository, infos, contents = origin
    folder = node.settings.folder
    path = folder / "objects" / infos[0].digest[:2] / infos[0].digest
    with path.open("r+b") as file:
        file.write(b"?")
    found = [node.ask("POST", f"/objects/{info.digest}/check") for info in infos[:3]]
    assert [(answer.status, answer.json["found"]) for answer in found] == [
        (200, "corrupt"),
        (200, "intact"),
        (200, "gone"),
    ]
    assert node.get_object(infos[0]).status == 404
    assert node.get_object(infos[0], repository).body == contents[0]
    assert node.ask("POST", "/objects/x/check").status == 400


def test_an_object_larger_than_a_write_comes_whole(run, tmp_path):
    repository = Repository.create(str(tmp_path / "origin"))
    content = bytes(range(256)) * (9 << 12) + b"end"
    info = repository.objects.put(content)
    node = run(repositories=(repository.url,), budget="100MB")
    assert node.get_object(info, repository).body == content
    assert node.get_object(info, Range="bytes=4194303-8388609").body == content[4194303:8388610]


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "A" * 64,
        "0" * 63,
        "0" * 65,
        "%00" * 64,
        "0" * 32 + "/" + "0" * 31,
    ],
)
def test_a_path_that_is_no_digest_is_refused(node, path):
    answer = node.get(f"/objects/{path}")
    assert answer.status in (400, 404)
    assert "error" in answer.json


def test_what_is_not_resident_is_missing_unless_an_origin_is_named(node, origin):
    answer = node.get_object(origin[1][2])
    assert answer.status == 404
    assert "origin" in answer.json["error"]


def test_an_object_is_fetched_once_for_all_who_ask(run, origin):
    repository, infos, contents = origin
    # So slow that all ask while the first one waits for its turn.
    node = run(repositories=(repository.url,), origin_rate_bytes_s=OBJECT_BYTES)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: node.get_object(infos[2], repository), range(8)))
    assert {(answer.status, answer.body) for answer in answers} == {(200, contents[2])}
    # Served bytes are counted after the last byte of an answer.
    status = node.wait_for(lambda status: status["cache"]["counters"].get("served_bytes") == 8 * OBJECT_BYTES)
    assert status["cache"]["counters"]["origin_bytes"] == OBJECT_BYTES


def test_an_origin_that_is_not_the_nodes_own_is_never_asked(node, origin, tmp_path):
    other = Repository.create(str(tmp_path / "other"))
    info = other.objects.put(b"not for this node")
    answer = node.get_object(info, other)
    assert answer.status == 404
    assert "--repo" in answer.json["error"]
    assert node.get_object(info, other, Range="bytes=0-").status == 404


@pytest.mark.parametrize("size", ["", "-1", "x", "1e3", "9" * 40, "%D9%A3", "2251799813685248"])
def test_a_size_that_is_none_is_refused(node, origin, size):
    repository, infos, _ = origin
    answer = node.get(f"/objects/{infos[3].digest}?origin={repository.url}&size={size}")
    assert answer.status == 400
    assert "size" in answer.json["error"]


def test_an_object_that_the_origin_lacks_is_missing(node, origin):
    repository, _, _ = origin
    assert node.get_object(ObjectInfo(digest_of(b"nowhere"), 7), repository).status == 404


def test_a_size_that_is_a_lie_makes_no_room(run, origin):
    repository, infos, contents = origin
    node = run(repositories=(repository.url,), budget=3 * OBJECT_BYTES)
    assert node.get_object(infos[0], repository).body == contents[0]
    for digest, status in ((infos[1].digest, 400), (digest_of(b"nowhere"), 404)):
        lie = ObjectInfo(digest, 3 * OBJECT_BYTES - 5000)
        assert node.get_object(lie, repository).status == status
    assert node.get_object(infos[0]).body == contents[0]
    assert node.get_object(infos[1], repository).body == contents[1]


def test_a_wrong_object_of_the_origin_is_never_served(node, origin):
    repository, infos, contents = origin
    path = repository.objects.local_path(infos[4].digest)
    path.chmod(0o644)
    path.write_bytes(contents[4][:-1] + b"?")
    answer = node.get_object(infos[4], repository)
    assert (answer.status, contents[4][:100] in answer.body) == (502, False)


def test_an_object_that_does_not_fit_is_refused_and_the_peer_asks_elsewhere(run, origin):
    repository, infos, _ = origin
    node = run(repositories=(repository.url,), budget=50_000)
    assert node.get_object(infos[0], repository).status == 507


def test_a_peer_that_hangs_up_frees_what_it_read(run, tmp_path):
    repository = Repository.create(str(tmp_path / "origin"))
    info = repository.objects.put(bytes(64 << 20))
    node = run(repositories=(repository.url,), budget="100MB")
    assert node.ask("HEAD", f"/objects/{info.digest}").status == 404
    node.get_object(info, repository, Range="bytes=0-9")
    connection = node.connect()
    connection.request("GET", f"/objects/{info.digest}")
    assert connection.getresponse().read(10) == bytes(10)
    assert node.wait_for(lambda status: status["cache"]["held_bytes"])["serving"]["num_streams"] == 1
    connection.close()
    status = node.wait_for(lambda status: not status["cache"]["held_bytes"])
    assert (status["serving"]["num_streams"], status["serving"]["num_broken"]) == (0, 1)
