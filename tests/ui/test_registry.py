"""The registry below `/v1`: its OpenAPI document, and responses that it describes."""

import itertools
import json
from urllib.parse import quote, urlencode

import pytest

import datasvc
from datasvc.runs import RunLog
from datasvc.testing import small_dataset
from datasvc.ui.registry.routes import ROUTES
from tests.support.doc_blocks import read_blocks, replace_in, run_blocks
from tests.ui.conftest import fill_repository, running_ui
from tests.ui.test_hostile import HOSTILE, SOME

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A repository in which every route has something to return. Tests must not change it."""
    folder = tmp_path_factory.mktemp("registry")
    repo = fill_repository(folder / "repo")
    repo.models.tag("cnn@1", "prod")
    repo.models.tag("cnn@3", "prod")
    repo.models.tag("cnn@1", "old")
    repo.models.untag("cnn", "old")
    repo.models.remove(["cnn@2"], message="diverged")
    (folder / "cnn.bin").write_bytes(b"1234")
    repo.models.attach("cnn@3", folder / "cnn.bin")
    log = RunLog.open(repo.repository, "cnn", run_id="20261123-221830-3fa9c1", data=["pets@2"])
    log.close()
    return repo


@pytest.fixture(scope="module")
def server(repo):
    with running_ui(repo.repository.url) as server:
        yield server


@pytest.fixture(scope="module")
def document(server):
    return json.loads(server.get("/v1/openapi.json")[2])


def read(server, path):
    """Return the JSON of a response."""
    status, headers, text = server.get(f"/v1{path}")
    assert (status, headers["Content-Type"]) == (200, "application/json"), text
    return json.loads(text)


def schema_validator(document, schema):
    """Return the validator of a schema of the document, which allows no field that the document lacks."""
    from openapi_schema_validator import OAS31Validator

    strict = {
        name: {**each, "additionalProperties": False} for name, each in document["components"]["schemas"].items()
    }
    return OAS31Validator({**schema, "components": {"schemas": strict}})


def addresses(repo):
    """Return an address of each route."""
    key = next(iter(repo.datasets.head("pets@2", 1, split="train"))).key
    names = {"models": "cnn", "datasets": "pets", "runs": "cnn"}
    for route in ROUTES:
        kind = route.path.split("/")[1]
        path = route.path.format(name=names[kind], version="2" if kind == "datasets" else "3", tag="prod", id=
                                 "20261123-221830-3fa9c1")  # fmt: skip
        yield route, path + (f"?{urlencode({'key': key})}" if route.name == "read_sample_users" else "")


def test_the_document_is_valid_openapi(document):
    from openapi_spec_validator import validate

    validate(document)
    names = [operation["get"]["operationId"] for operation in document["paths"].values()]
    assert len(set(names)) == len(names) == len(ROUTES)


def test_every_response_is_as_the_document_describes_it(server, repo, document):
    for route, address in addresses(repo):
        described = document["paths"][f"/v1{route.path}"]["get"]["responses"]["200"]
        found = read(server, address)
        schema_validator(document, described["content"]["application/json"]["schema"]).validate(found)
        assert found.get("items", ["an item"]), address


def test_the_fields_are_stable(document):
    # A program of a user reads these. Add to them, but never rename or remove one without a `/v2`.
    schemas = document["components"]["schemas"]
    fields = {name: " ".join(schema["properties"]) for name, schema in schemas.items()}
    assert document["info"]["version"] == "1.0"
    assert fields == {
        "ArtefactFacts": "name format digest created message details files",
        "ArtefactList": "repository items",
        "ChunkFacts": "start shape digest",
        "DatasetDetails": "name version ref created message splits entry",
        "DatasetRow": "version ref created message samples bytes tags removed branch",
        "DatasetVersionsPage": "items next unreadable",
        "LineageFacts": "version models datasets shards gaps",
        "ModelDetails": "name version ref created message step metrics data parents run tensors entry",
        "ModelRow": "version ref created message step metrics tags removed",
        "ModelVersionsPage": "items next unreadable",
        "NamesPage": "items next unreadable",
        "ObjectFacts": "digest size_bytes path",
        "ObjectsPage": "repository num_objects total_bytes items next",
        "ProblemDetails": "title status detail",
        "RegisteredName": "name newest num_versions removed tags branches",
        "RegisteredTag": "name tag version ref",
        "RunFacts": "ref name id state message started_s last_s step latest versions data world_size verdict",
        "RunsPage": "items next",
        "SampleUsers": "samples missing versions gaps consumed unreadable",
        "SplitFacts": "samples bytes shards table",
        "TagHistory": "items",
        "TagList": "items unreadable",
        "TagMove": "version created",
        "TensorFacts": "name dtype shape size_bytes chunks",
        "TensorsPage": "num_tensors items next",
        "TrainedModels": "version models unreadable",
    }


def test_a_tag_leads_to_the_version_its_objects_and_its_tensors(server, repo):
    assert read(server, "/models/cnn/tags/prod") == {"name": "cnn", "tag": "prod", "version": 3, "ref": "cnn@3"}
    assert read(server, "/models/cnn/tags/prod~1")["version"] == 1
    assert read(server, "/models/cnn/tags/latest")["version"] == 4
    assert read(server, "/models/cnn/tags/best:loss")["version"] == 3
    assert read(server, "/datasets/pets/tags/prod")["ref"] == "pets@2"
    assert [move["version"] for move in read(server, "/models/cnn/tags/old/history")["items"]] == [1, None]
    assert server.get("/v1/models/cnn/tags/old")[0] == server.get("/v1/models/cnn/tags/never/history")[0] == 404
    version = read(server, "/models/cnn/versions/3")
    assert version["metrics"] == repo.models.describe("cnn@3").entry["metrics"]
    assert (version["data"], version["step"]) == (["pets@2"], 30)
    tensors = {tensor["name"]: tensor for tensor in read(server, "/models/cnn/versions/3/tensors")["items"]}
    assert tensors["model.fc.weight"]["shape"] == [8, 4]
    for path in ("/models/cnn/versions/3/objects", "/datasets/pets/versions/2/objects"):
        objects = read(server, path)
        assert objects["repository"] == repo.repository.url
        assert objects["total_bytes"] == sum(found["size_bytes"] for found in objects["items"])
        for found in objects["items"]:
            assert repo.repository.storage.size(found["path"]) == found["size_bytes"]
    assert version["tensors"] in {
        found["digest"] for found in read(server, "/models/cnn/versions/3/objects")["items"]
    }


def test_lineage_is_found_in_both_directions(server, repo):
    lineage = read(server, "/models/cnn/versions/3/lineage")
    assert lineage == json.loads(json.dumps(repo.models.lineage("cnn@3").to_dict()))
    assert read(server, "/datasets/pets/versions/2/models")["models"] == ["cnn@4", "cnn@3", "cnn@1"]
    assert read(server, "/datasets/birds/versions/1/models")["models"] == []
    # Every version has read two batches of eight: some of these samples.
    keys = [sample.key for sample in repo.datasets.head("pets@2", 94, split="train")]
    key = next(use.key for use in repo.models.trained_on(keys=keys, data="pets").all_uses())
    expected = json.loads(json.dumps(repo.models.trained_on(keys=[key], data="pets").to_json()))
    assert expected["consumed"]
    assert read(server, f"/datasets/pets/consumers?{urlencode({'key': key})}") == {**expected, "unreadable": []}
    assert read(server, "/datasets/pets/consumers?key=nobody")["missing"] == ["nobody"]


def test_a_removed_version_is_not_found_unless_it_is_accepted(server):
    status, headers, text = server.get("/v1/models/cnn/versions/2")
    assert (status, headers["Content-Type"]) == (404, "application/problem+json; charset=utf-8")
    assert "diverged" in json.loads(text)["detail"]
    assert headers["Cache-Control"] == "no-store"
    assert read(server, "/models/cnn/versions/2?removed=true")["step"] == 20
    assert read(server, "/models/cnn")["removed"] == [2]


def test_pages_follow_each_other(server):
    first = read(server, "/models/cnn/versions?limit=3")
    assert [row["version"] for row in first["items"]] == [4, 3, 2]
    assert [row["removed"] for row in first["items"]] == [False, False, True]
    last = read(server, f"/models/cnn/versions?limit=3&after={first['next']}")
    assert ([row["version"] for row in last["items"]], last["next"]) == ([1], None)
    names = read(server, "/datasets?limit=1")
    assert names["items"][0]["name"] == "birds"
    assert read(server, f"/datasets?limit=1&after={names['next']}")["items"][0]["tags"] == {"prod": 2}
    objects = read(server, "/datasets/pets/versions/2/objects?limit=1")
    rest = read(server, f"/datasets/pets/versions/2/objects?after={objects['next']}")
    assert 1 + len(rest["items"]) == objects["num_objects"] == rest["num_objects"]
    assert server.get("/v1/models/cnn/versions?limit=0")[0] == 400


def test_a_reader_asks_again_with_an_etag(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    repo.models.save("net", {"w": [1]}, step=1)
    repo.models.tag("net@1", "prod")
    with running_ui(tmp_path / "repo") as server:
        _, headers, _ = server.get("/v1/models/net/tags/prod")
        assert headers["Cache-Control"] == "private, no-cache"
        known = {"If-None-Match": f'"x", W/{headers["ETag"]}'}
        status, again, text = server.get("/v1/models/net/tags/prod", **known)
        assert (status, again["ETag"], text) == (304, headers["ETag"], "")
        repo.models.save("net", {"w": [2]}, step=2)
        repo.models.tag("net@2", "prod")
        assert json.loads(server.get("/v1/models/net/tags/prod", **known)[2])["version"] == 2
        _, headers, _ = server.get("/v1/models/net/versions/1")
        assert headers["Cache-Control"] == "private, max-age=31536000, immutable"


def test_head_has_the_headers_of_get_and_other_methods_are_refused(server):
    import http.client

    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("HEAD", "/v1/models/cnn/tags/prod")
    response = connection.getresponse()
    body, status = response.read(), response.status
    assert (status, body) == (200, b"")
    assert response.headers["ETag"] == server.get("/v1/models/cnn/tags/prod")[1]["ETag"]
    connection.request("POST", "/v1/models/cnn/tags/prod", body=b"x")
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (405, "application/problem+json; charset=utf-8")
    assert "GET" in response.headers["Allow"]
    connection.close()


def test_access_is_that_of_the_pages(repo, document, server):
    assert server.get("/v1/models", Host="attacker.example")[0] == 421
    with running_ui(repo.repository.url, token=TOKEN) as guarded:
        status, headers, text = guarded.get("/v1/models")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        schema_validator(document, {"$ref": "#/components/schemas/ProblemDetails"}).validate(json.loads(text))
        assert guarded.get("/v1/models", Authorization=f"Bearer {TOKEN}")[0] == 200


BAD_NAMES = [
    *HOSTILE,
    "..",
    "../../etc/passwd",
    "a/b",
    "x\0y",
    "cnn@1",
    "CNN",
    "-",
    "a" * 200,
    "1",
    "%2e%2e",
    "\u0663",
]


def test_hostile_names_are_problems(server, document):
    validator = schema_validator(document, {"$ref": "#/components/schemas/ProblemDetails"})
    paths = ["datasets/{}", "models/cnn/tags/{}", "models/{}/versions/1/objects", "models/cnn/versions/x{}",
             "models/{}/tags/x/history", "runs/cnn/{}"]  # fmt: skip
    # Each name in one path, and the worst of them in each.
    addresses = [*zip(itertools.cycle(paths), BAD_NAMES), *itertools.product(paths, SOME)]
    for path, name in addresses:
        address = path.format(quote(name, safe="").replace(".", "%2E"))
        status, headers, text = server.get(f"/v1/{address}")
        assert status in {400, 404}, (address, status, text)
        assert headers["Content-Type"].startswith("application/problem+json")
        assert headers["X-Content-Type-Options"] == "nosniff"
        validator.validate(json.loads(text))
    assert server.get("/v1/datasets/pets/consumers")[0] == 400
    assert server.get("/v1/nowhere")[0] == 404


def test_what_cannot_be_read_is_said(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    for step in (1, 2):
        repo.models.save("net", {"w": [step]}, step=step)
    (entry,) = (tmp_path / "repo" / "models" / "net" / "versions").glob("*1.json")
    entry.write_bytes(b"{")
    with running_ui(tmp_path / "repo") as server:
        found = read(server, "/models/net/versions")
        assert [row["version"] for row in found["items"]] == [2]
        assert "net@1" in found["unreadable"][0]
        assert server.get("/v1/models/net/versions/1")[0] == 502


def test_the_lines_of_the_page_run(tmp_path, server):
    blocks = [block for block in read_blocks("ask-without-python.md") if block.language == "sh"]
    known = {
        "http://registry:8766": server.url,
        "digits-cnn": "cnn",
        "digits/": "pets/",
    }
    printed = run_blocks(replace_in(blocks, known), tmp_path, TOKEN=TOKEN)
    assert "prod is cnn@3" in printed
    assert (tmp_path / "table").stat().st_size > 0


def test_the_branches_of_a_data_set_are_listed_with_their_heads_and_are_no_tags(tmp_path):
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    small_dataset(repo, "pets", samples=12)
    repo.datasets.branch("pets", "work")
    repo.datasets.delete("pets@work", where="label = 0")
    with running_ui(repo.repository.url) as server:
        described = read(server, "/datasets/pets")
        assert (described["newest"], described["branches"], described["tags"]) == (1, {"work": 2}, {})
        rows = {row["version"]: row["branch"] for row in read(server, "/datasets/pets/versions")["items"]}
        assert rows == {1: None, 2: "work"}
        assert server.get("/v1/datasets/pets/tags/work")[0] == 404
        assert read(server, "/datasets")["items"][0]["branches"] == {"work": 2}
        _, _, page = server.get("/datasets/pets@work")
        assert "on branch work" in page
        assert "3 fewer than pets@1" in page
        assert "branch work=2" in server.get("/datasets")[2]
