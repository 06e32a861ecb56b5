"""Images decoded by nodes: the pixels of this machine, whatever happens to a node."""

import json
import logging
import socket
import struct
import threading

import numpy as np
import pytest

from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.augment.augment import AugmentConfig, Windows
from datasvc.loaders.decode import serving
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.decode.servers import DecodeServers
from datasvc.loaders.decode.serving import Decoder, EncodedImage, pack_request, parse_answer, parse_request
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.node.http.auth import Tenant
from datasvc.node.http.routes import DecodeRoutes
from tests.loaders.decode.photos import SIZE, broken, decode, photos, windows
from tests.node import conftest
from tests.node.conftest import RunningNode
from tests.support.ports import reserved_ports

OTHER = {**serving.find_versions(), "Pillow": "0.1"}
PACK = serving.pack_answer
certificate = conftest.certificate
DECODER = Decoder(SIZE, "cpu", "torch")
TOKEN = "0123456789abcdef"
IMAGES = [EncodedImage(blob, [1, 2], [40, 50]) for blob in photos(5)]


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.delenv("DATASVC_TOKEN", raising=False)
    nodes = []

    def start_node(**settings):
        folder = tmp_path / f"node{len(nodes)}"
        nodes.append(RunningNode(**{"folder": folder, "budget": "10MB", "decode_threads": 1, **settings}))
        return nodes[-1]

    yield start_node
    for node in nodes:
        node.stop()


def make_backend(*urls, output="uint8", backend="cpu", framework="torch", scale="full"):
    config = BackendConfig(
        batch_size=8,
        size=SIZE,
        pixels=PixelFormat(output),
        num_threads=1,
        prefetch=2,
        servers=urls,
        decode_scale=scale,
    )
    return CpuBackend(config, backend=backend, framework=framework, profiler=StepProfiler())


def changed(pixels, bad, _instance):
    """Answer as another server with other software would: with other pixels."""
    return PACK(np.bitwise_xor(pixels, 1), bad, "another")


def only_on_servers(backend):
    """Let all threads of a backend send to its servers, so that no chance decides which of them decodes an image."""
    connections = [each for each in backend._connections if each is not None]
    backend._connections = [*connections, *backend._servers.connections()]
    return backend


def test_a_server_decodes_large_photos_at_the_scale_of_this_machine(start):
    images, crops = (
        photos(4, width=400, height=300),
        Windows(*np.int32([[[0, 0]] * 4, [[290, 390]] * 4]), np.zeros(4)),
    )
    node = start()
    backends = [make_backend(scale="auto"), only_on_servers(make_backend(node.url, scale="auto")), make_backend()]
    here, there, full = [decode(backend, images, crops).images.copy() for backend in backends]
    for backend in backends:
        backend.close()
    assert np.array_equal(here, there)
    assert not np.array_equal(here, full)
    body = b"".join(pack_request(Decoder(SIZE, "cpu", "torch", "half"), IMAGES))
    with pytest.raises(ConfigError, match="decode_scale is 'half'"):
        parse_request(body)


@pytest.mark.parametrize("backend", ["cpu", "pillow"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_server_decodes_to_the_pixels_of_this_machine(start, backend, framework):
    node = start()
    bad = broken(photos(1)[0])
    images, crops = [*photos(6), bad, photos(1)[0][:40]], windows(8)
    makers = [lambda: make_backend(output="float32", backend=backend, framework=framework)]
    makers.append(
        lambda: only_on_servers(make_backend(node.url, output="float32", backend=backend, framework=framework))
    )
    results = []
    for make in makers:
        decoder = make()
        results.append(decode(decoder, images, crops))
        decoder.close()
    here, there = results
    assert np.array_equal(np.asarray(here.images), np.asarray(there.images))
    assert set(here.bad) == {6, 7}
    assert here.bad == there.bad
    status = node.get("/status").json["decoding"]
    assert (status["num_threads"], status["num_images"]) == (1, 8 + 4)  # four of the probe
    assert "datasvc_decoded_images_total 12.0" in node.get("/metrics").body.decode()


@pytest.mark.parametrize("evaluation", [None, "torchvision"])
def test_batches_of_a_loader_do_not_depend_on_its_servers(start, digits, evaluation):
    node = start()
    augment = AugmentConfig(brightness=0.4) if evaluation is None else AugmentConfig(evaluation=evaluation)

    def batches(*servers):
        loader = ImageLoader(
            digits["train"],
            batch_size=16,
            training=evaluation is None,
            size=32,
            augment=augment,
            decode=DecodeConfig(num_threads=1, servers=servers),
        )
        with loader:
            return [batch.images.numpy().copy() for batch, _ in zip(loader, range(4), strict=False)]

    for here, there in zip(batches(), batches(node.url), strict=True):
        assert np.array_equal(here, there)


def test_what_a_lost_server_does_not_decode_is_decoded_here(start, caplog):
    with reserved_ports(1) as (port,):
        node = start(port=port)
        backend = only_on_servers(make_backend(node.url))
        images, crops = photos(8), windows(8)
        expected = decode(make_backend(), images, crops).images
        assert np.array_equal(decode(backend, images, crops).images, expected)
        node.stop()
        for _ in range(3):
            assert np.array_equal(decode(backend, images, crops).images, expected)
        assert caplog.text.count("its part is decoded here, and it is tried again") == 1
        node = start(port=port)
        while "is used again" not in caplog.text:  # the time limit of the test ends it otherwise
            assert np.array_equal(decode(backend, images, crops).images, expected)
        backend.close()
    assert node.get("/decode").json["num_images"] > 4


def test_a_server_with_other_software_after_a_failure_is_not_used(start, monkeypatch, caplog):
    with reserved_ports(1) as (port,):
        (server,) = (servers := DecodeServers([start(port=port).url], DECODER))._servers.values()
        (connection,) = servers.connections()
        assert connection.decode(IMAGES) is not None
        server.record_failure("it was asked to pause")
        connection._server.disconnect(connection._connection)
        connection._connection = None
        monkeypatch.setattr(serving, "pack_answer", changed)
        while not server.is_due():
            pass
        assert connection.decode(IMAGES) is None
        assert servers.num_images == {server._url: len(IMAGES)}
        assert not server.is_due()


def test_a_server_that_is_not_there_at_the_start_is_tried_again_after_more_and_more_tasks(caplog):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        servers = DecodeServers([f"http://127.0.0.1:{bound.getsockname()[1]}"], DECODER)
        connection = servers.connections()[0]
        assert "its part is decoded here" in caplog.text
        (server,) = servers._servers.values()
        pauses = []
        for _ in range(3):
            skipped = 1
            while not server.is_due():
                skipped += 1
            pauses.append(skipped)
            server.record_failure("it was asked to pause")
            server.record_failure("another thread had sent something before")
        assert pauses == [8, 16, 32]
        assert connection.decode(IMAGES) is None
        while server._skip > 1:
            assert not server.is_due()
        assert server.is_due()
        assert not server.is_due()  # one thread tries, the others do not wait for it
        server.record_success(1)
        assert server.is_due()
        assert server.is_due()


def test_a_connection_that_the_server_has_closed_is_opened_again(start, caplog):
    node = start()
    servers = DecodeServers([node.url], DECODER)
    (connection,) = servers.connections()
    assert connection.decode(IMAGES) is not None
    connection._connection.sock.shutdown(socket.SHUT_RDWR)
    assert connection.decode(IMAGES) is not None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_ends_the_wait_for_an_answer(start, monkeypatch, caplog):
    node, reached, go_on = start(), threading.Event(), threading.Event()
    servers = DecodeServers([node.url], DECODER)
    (connection,) = servers.connections()
    assert connection.decode(IMAGES) is not None  # so that the next request reuses a connection
    scale = serving.DecodeServer._scale

    def wait(*given):
        reached.set()
        go_on.wait()
        return scale(*given)

    monkeypatch.setattr(serving.DecodeServer, "_scale", wait)
    results = []
    waiting = threading.Thread(target=lambda: results.append(connection.decode(IMAGES)))
    waiting.start()
    reached.wait()
    servers.close()
    waiting.join()
    go_on.set()
    assert results == [None]
    assert not connection.is_due()
    assert "is not used" not in caplog.text


@pytest.mark.slow
def test_a_node_that_stops_ends_after_the_current_images_within_its_grace(start, monkeypatch):
    node, reached, go_on = start(grace_s=0.0), threading.Event(), threading.Event()
    servers = DecodeServers([node.url], DECODER)
    (connection,) = servers.connections()

    def wait(*_):
        reached.set()
        go_on.wait()
        raise BadSampleError("was waited for")

    monkeypatch.setattr(serving.DecodeServer, "_scale", wait)
    waiting = threading.Thread(target=lambda: connection.decode(IMAGES))
    waiting.start()
    reached.wait()
    assert node.stop() is False  # not all threads have ended
    go_on.set()
    waiting.join()


def test_nodes_that_must_not_be_used_are_refused_with_what_to_do(start, monkeypatch):
    with pytest.raises(ConfigError, match="start it with --decode-threads"):
        DecodeServers([start(decode_threads=0).url], DECODER)
    with pytest.raises(ConfigError, match="requires a token"):
        DecodeServers([start(token=TOKEN).url], DECODER)
    monkeypatch.setenv("DATASVC_TOKEN", TOKEN)
    DecodeServers([start(token=TOKEN).url], DECODER).close()
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        DecodeConfig(servers=("node7",))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="not a node of datasvc"):
        patch.setattr(serving.DecodeServer, "describe", lambda _: {"threads": 1})
        DecodeServers([start(token=TOKEN).url], DECODER)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"has Pillow 0\.1 \(here .*the same versions"),
    ):
        patch.setattr(serving.DecodeServer, "describe", lambda _: {"num_threads": 1, "versions": OTHER})
        DecodeServers([start(token=TOKEN).url], DECODER)
    monkeypatch.setattr(serving, "pack_answer", changed)
    with pytest.raises(ConfigError, match="other pixels than this machine"):
        DecodeServers([start(token=TOKEN).url], DECODER)


def test_a_gpu_does_not_decode_beside_servers(digits):
    with pytest.raises(ConfigError, match="decode servers decode as a CPU does"):
        ImageLoader(
            digits["train"],
            batch_size=8,
            training=True,
            device="cuda:0",
            decode=DecodeConfig("gpu-whole", servers=("http://a:1",)),
        )


def test_a_request_is_read_as_it_was_packed():
    images = [
        EncodedImage(np.arange(9, dtype=np.uint8), [1, 2], [3, 4]),
        EncodedImage(np.empty(0, np.uint8), [0, 0], [1, 1], [0.5, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 9.0, 9.0]),
    ]
    decoder, found = parse_request(b"".join(pack_request(DECODER, images)))
    assert decoder == DECODER
    for image, other in zip(images, found, strict=True):
        assert np.array_equal(image.blob, other.blob)
        assert [other.start, other.shape, other.box, other.region] == [
            image.start,
            image.shape,
            image.box,
            image.region,
        ]


HEAD = {"size": 8, "backend": "cpu", "framework": "torch", "images": [[3, [0, 0], [1, 1], None, None]]}
HOSTILE = [
    {"size": 0},
    {"size": True},
    {"size": 1 << 20},
    {"backend": "gpu-whole"},
    {"framework": ["torch"]},
    {"other": 1},
    {"images": None},
    {"images": [[3, [0, 0], [1, 1], None]]},
    {"images": [[-1, [0, 0], [1, 1], None, None]]},
    {"images": [[4, [0, 0], [1, 1], None, None]]},
    {"images": [[2, [0, 0], [1, 1], None, None]]},
    {"images": [[3, [0, 1 << 40], [1, 1], None, None]]},
    {"images": [[3, [0, 0, 0], [1, 1], None, None]]},
    {"images": [[3, [0, 0], [1, 1], [0.0, 0.0, float("nan"), 1.0], None]]},
    {"images": [[3, [0, 0], [1, 1], None, [1.0]]]},
    {"images": [[3, [0, 0], [1, 1], None, None]] + [[0, [0, 0], [1, 1], None, None]] * 64},
    {"size": 4096, "images": [[3, [0, 0], [1, 1], None, None]] + [[0, [0, 0], [1, 1], None, None]] * 9},
]


def body_of(head, tail=b"abc"):
    text = json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + tail


def test_hostile_requests_are_refused_before_anything_is_decoded(start):
    parse_request(body_of(HEAD))
    bodies = [body_of(HEAD | change) for change in HOSTILE]
    for body in [*bodies, b"", b"\1", b"\xff\xff\xff\xff{}", body_of([]), body_of(HEAD)[:-30], b"\4\0\0\0[[[["]:
        with pytest.raises(ConfigError, match=r"not one to decode images|at most"):
            parse_request(body)
    node = start()
    for kind, reason in (("application/octet-stream", "not one to decode images"), ("text/plain", "a body of type")):
        answer = node.ask("POST", "/decode", bodies[0], Content_Type=kind)
        assert (answer.status, reason in answer.json["error"]) == (400, True)
    connection = node.connect()
    connection.putrequest("POST", "/decode")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert b"a body of type" in connection.getresponse().read()  # as of a page in a browser
    connection.close()
    connection = node.connect()
    connection.putrequest("POST", "/decode")
    connection.putheader("Content-Type", "application/octet-stream")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert b"Content-Length of at most" in connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize(
    "body", [b"", body_of({}), body_of({"bad": {}}), body_of({"bad": {"7": "x"}}, bytes(2 * 3 * 3 * 3))]
)
def test_an_answer_of_something_else_is_an_error(body):
    with pytest.raises(ValueError, match="its answer"):
        parse_answer(body, 2, 3)


def test_images_that_a_server_does_not_take_are_decoded_here(start, monkeypatch, caplog):
    node = start()
    images, crops = photos(8), windows(8)
    expected = decode(make_backend(), images, crops)
    for name, value in (
        ("datasvc.loaders.decode.cpu._MAX_SENT_BYTES", 10),
        ("datasvc.loaders.decode.serving.MAX_PIXELS", 10),
    ):
        backend = only_on_servers(make_backend(node.url))
        before = node.get("/decode").json["num_images"]
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            found = decode(backend, images, crops)
        backend.close()
        assert np.array_equal(found.images, expected.images)
        assert found.bad == {}
        assert (node.get("/decode").json["num_images"] > before) == name.endswith("MAX_PIXELS")
    assert "is not used" not in caplog.text


def test_a_busy_node_keeps_its_connections_and_the_others_decode_here(start, caplog):
    node = start(decode_threads=8, max_connections=1)
    servers = DecodeServers([node.url], DECODER)
    first, second = servers.connections()
    assert first.decode(IMAGES) is not None
    assert second.decode(IMAGES) is None
    assert [second.is_due() for _ in range(3)] == [False] * 3
    assert first.is_due()
    assert first.decode(IMAGES) is not None
    assert "is not used" not in caplog.text
    servers.close()


def test_after_a_lost_connection_the_server_is_checked_again(start, monkeypatch):
    servers = DecodeServers([start().url], DECODER)
    (connection,) = servers.connections()
    assert connection.decode(IMAGES) is not None
    connection._connection.sock.shutdown(socket.SHUT_RDWR)
    monkeypatch.setattr(serving, "pack_answer", changed)
    assert connection.decode(IMAGES) is None


def test_a_server_that_was_replaced_is_checked_before_its_pixels_are_used(start, monkeypatch, caplog):
    node = start()
    servers = DecodeServers([node.url], DECODER)
    (connection,) = servers.connections()
    monkeypatch.setattr(serving, "pack_answer", lambda pixels, bad, _: PACK(pixels, bad, "another"))
    assert connection.decode(IMAGES) is not None  # of the same software
    before = node.get("/decode").json["num_images"]
    assert connection.decode(IMAGES) is not None
    assert node.get("/decode").json["num_images"] == before + len(IMAGES)  # it is not checked each time
    monkeypatch.setattr(serving, "pack_answer", lambda *given: changed(*given)[:-1] + b"\0")
    servers._servers[node.url]._instance = "the one before"
    assert connection.decode(IMAGES) is None
    assert "other pixels than this machine" in caplog.text


def test_a_node_or_a_proxy_may_end_a_connection_with_its_answer(start, monkeypatch, caplog):
    handle = DecodeRoutes.decode

    async def end(routes, request):
        response = await handle(routes, request)
        response.force_close()
        return response

    monkeypatch.setattr(DecodeRoutes, "decode", end)
    servers = DecodeServers([start().url], DECODER)
    (connection,) = servers.connections()
    for _ in range(2):
        assert connection.decode(IMAGES) is not None
    servers.close()
    assert "is not used" not in caplog.text


def test_an_answer_that_is_too_large_is_not_read_to_its_end(start, monkeypatch, caplog):
    servers = DecodeServers([start().url], DECODER)
    (connection,) = servers.connections()
    monkeypatch.setattr(serving, "pack_answer", lambda *given: PACK(*given) + bytes(1 << 20))
    assert connection.decode(IMAGES) is None
    assert "its answer has more than" in caplog.text


def test_tokens_of_tenants_and_certificates_serve_loaders_too(start, certificate, monkeypatch):
    monkeypatch.setenv("DATASVC_TOKEN", "f" * 16)
    monkeypatch.setenv("DATASVC_CA", str(certificate[0]))
    node = start(
        token=TOKEN,
        tenants=(Tenant("vision", "f" * 16, ()),),
        certificate=certificate[0],
        certificate_key=certificate[1],
    )
    assert node.url.startswith("https:")
    servers = DecodeServers([node.url.replace("127.0.0.1", "localhost")], DECODER)
    (connection,) = servers.connections()
    assert connection.decode(IMAGES) is not None
    # The server ends the connection; nothing may then go over another one without TLS.
    connection._connection.close()
    assert connection.decode(IMAGES) is not None
    servers.close()
