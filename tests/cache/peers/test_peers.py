"""Peers over real sockets: whom we ask, what they answer, and how soon a bad one is given up."""

import pickle
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from types import SimpleNamespace

import pytest

from datasvc.cache.peers import peer_source, placement
from datasvc.cache.peers.membership import FixedMembership
from datasvc.cache.peers.peer_source import PeerSettings
from datasvc.cache.peers.peers import Peers
from datasvc.cache.peers.placement import rank_nodes
from datasvc.cache.sources.origin_source import PART_BYTES
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.repository import ObjectInfo
from datasvc.repository.objects.objects import digest_of
from tests.cache.peer_server import PeerServer, Strangers
from tests.cache.sources import object_source_laws
from tests.cache.sources.object_source_laws import ObjectSourceLaws
from tests.support.dripping_server import DrippingServer
from tests.support.ports import reserved_ports

CONTENT = bytes(range(251)) * 20000
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))
# A peer that is given up for being slow must be so by a factor; a good one on a busy machine must not.
PATIENT = PeerSettings()
HASTY = PeerSettings(stall_timeout_s=0.5, connect_timeout_s=0.5, rate_window_s=0.2, min_bytes_s=1000)
ORIGIN = "s3://bucket/repo"


@pytest.fixture
def peer(request):
    with PeerServer({INFO.digest: CONTENT}, getattr(request, "param", None)) as server:
        yield server


def peers_at(url, settings=PATIENT):
    return Peers(Strangers(url), settings)


def ask(peers, offset=0, length=INFO.size_bytes):
    """Return what a single peer gives."""
    content = bytearray()

    def sink(at, view):
        assert at == offset + len(content)
        content.extend(view)

    peers.sources(INFO, ORIGIN)[0].stream(INFO, offset, length, sink)
    return bytes(content)


class TestPeerSource(ObjectSourceLaws):
    kind = "peer"

    @pytest.fixture
    def open_source(self):
        with PeerServer({object_source_laws.INFO.digest: object_source_laws.CONTENT}) as server:
            peers = peers_at(server.url)
            yield lambda info: peers.sources(info, ORIGIN)[0]


def test_a_request_to_a_peer_names_the_origin_of_the_object(peer):
    peers = peers_at(peer.url)
    assert ask(peers) == CONTENT
    assert peer.requests == [(INFO.digest, None, {"origin": [ORIGIN], "size": [str(len(CONTENT))]})]
    assert peers.report()[peer.url].bytes_received == len(CONTENT)


@pytest.mark.parametrize(
    ("offset", "length", "header"),
    [
        (10, len(CONTENT) - 10, "bytes=10-"),
        (0, 7, "bytes=0-6"),
        (PART_BYTES, 5, f"bytes={PART_BYTES}-{PART_BYTES + 4}"),
    ],
)
def test_a_peer_gives_a_range(peer, offset, length, header):
    assert ask(peers_at(peer.url), offset=offset, length=length) == CONTENT[offset : offset + length]
    assert peer.requests[0][1] == header


def test_the_credentials_of_an_origin_stay_here(peer):
    peers = Peers(Strangers(peer.url), HASTY)
    source = peers.sources(INFO, "https://me:secret@host/repo?key=secret")[0]
    source.stream(INFO, 0, len(CONTENT), lambda *_: None)
    assert peer.requests[0][2]["origin"] == ["https://host/repo"]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (401, "refuses the token"),
        (403, "refuses the token"),
        (416, "object of this name is shorter"),
        (500, "answers with status 500"),
        (301, "answers with status 301"),
        (503, "busy"),
        (507, "no space for the object"),
        ("hang up", "closed the connection with"),
        ("short", r"bytes \(status 200\), expected"),
        ("garbage", "220 mail"),
        ("stall", "timed out"),
        ("trickle", "too slow"),
        ("dead", r"sent no answer for at least \S+ s, and then did not answer a health check"),
    ],
    indirect=["peer"],
)
def test_a_peer_that_fails_is_named_with_its_reason_and_left_alone(peer, message):
    lasts = peer.fault in ("stall", "trickle", "dead")
    peers = peers_at(peer.url, replace(HASTY, min_bytes_s=1 << 20) if lasts else PATIENT)
    with pytest.raises(UnavailableError, match=f"{peer.url}.*{message}"):
        ask(peers)
    assert peers.report()[peer.url].num_failed == 1
    assert peers.sources(INFO, ORIGIN) == []


@pytest.mark.parametrize("peer", ["no ranges", "shifted"], indirect=True)
def test_a_peer_that_sends_another_range_is_not_believed(peer):
    with pytest.raises(UnavailableError, match=", expected "):
        ask(peers_at(peer.url), offset=10, length=100)


def test_a_peer_that_lacks_the_object_is_well():
    with PeerServer({}) as peer:
        peers = peers_at(peer.url)
        with pytest.raises(NotFoundError, match="does not have the object"):
            ask(peers)
        report = peers.report()[peer.url]
        assert (report.num_missing, report.num_failed) == (1, 0)
        assert peers.sources(INFO, ORIGIN)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["silent"], indirect=True)
def test_a_peer_that_lives_may_take_its_time_to_answer(peer):
    peer.answers_after_checks = 3
    assert ask(peers_at(peer.url, replace(HASTY, connect_timeout_s=60))) == CONTENT
    assert peer.num_health_checks >= 3


@pytest.mark.parametrize("peer", ["silent"], indirect=True)
def test_a_peer_that_lives_but_never_answers_is_given_up_in_the_end(peer):
    settings = PeerSettings(connect_timeout_s=60, stall_timeout_s=0.05, answer_timeout_s=0.2)
    with pytest.raises(UnavailableError, match="no answer"):
        ask(peers_at(peer.url, settings))


def test_a_closed_port_and_one_that_never_accepts_are_given_up():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        clients = [socket.socket() for _ in range(8)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        with pytest.raises(UnavailableError, match="timed out"):
            ask(peers_at(url, HASTY))
        for client in clients:
            client.close()
    with reserved_ports(1) as (port,), pytest.raises(UnavailableError, match="refused"):
        ask(peers_at(f"http://127.0.0.1:{port}"))


def test_a_token_opens_the_door_and_is_in_no_message():
    settings = PeerSettings(token="a-very-secret-token")
    with PeerServer({INFO.digest: CONTENT}, token="a-very-secret-token") as peer:
        assert ask(peers_at(peer.url, settings)) == CONTENT
        with pytest.raises(UnavailableError, match="token"):
            ask(peers_at(peer.url))
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "gelöst"])
def test_a_token_that_no_header_can_carry_is_refused_at_once(token):
    with pytest.raises(ConfigError, match="token"):
        PeerSettings(token=token)


def test_a_time_out_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="stall_timeout_s"):
        PeerSettings(stall_timeout_s=0)


def test_only_nodes_that_rank_above_this_one_are_asked():
    nodes = [f"http://10.255.0.{number}:1" for number in range(1, 6)]
    ranked = rank_nodes(INFO.digest, nodes)
    for rank, own in enumerate(ranked):
        peers = Peers(FixedMembership(nodes, local_url=own), PATIENT)
        assert [source.name for source in peers.sources(INFO, ORIGIN)] == ranked[:rank]
        assert peers.stage_order([INFO.digest, "0" * 64]) == [INFO.digest, "0" * 64]


def test_of_many_nodes_one_that_may_have_a_copy_is_asked_before_the_owner():
    nodes = [f"http://10.255.0.{number}:1" for number in range(1, 41)]
    ranked = rank_nodes(INFO.digest, nodes)
    copies = []
    for rank, own in enumerate(ranked):
        asked = [source.name for source in Peers(FixedMembership(nodes, local_url=own)).sources(INFO, ORIGIN)]
        assert asked[len(asked) - rank :] == ranked[:rank]
        copies += asked[: len(asked) - rank]
    assert len(copies) > 25
    assert len(set(copies)) > 10


def test_a_peer_that_is_asked_for_a_copy_is_told_not_to_fetch(peer, monkeypatch):
    monkeypatch.setattr(placement, "_MIN_NODES_TO_SPREAD", 3)
    others = (f"http://node-{number}:1" for number in count())
    owner = next(url for url in others if rank_nodes(INFO.digest, [url, peer.url])[0] == url)
    last = (url for url in others if rank_nodes(INFO.digest, [url, peer.url])[1] == url)
    own = next(url for url in last if placement.choose_copy(INFO.digest, [owner, peer.url], url) == peer.url)
    sources = Peers(FixedMembership([own, owner, peer.url], local_url=own), PATIENT).sources(INFO, ORIGIN)
    assert [source.name for source in sources] == [peer.url, owner, peer.url]
    content = bytearray()
    sources[0].stream(INFO, 0, INFO.size_bytes, lambda _, view: content.extend(view))
    assert content == CONTENT
    assert peer.requests[0][2]["fetch"] == ["0"]


def test_of_many_nodes_each_stages_in_an_order_of_its_own():
    digests = [digest_of(bytes([number])) for number in range(50)]
    nodes = [f"http://10.255.0.{number}:1" for number in range(1, 41)]
    orders = [Peers(FixedMembership(nodes, local_url=own)).stage_order(digests) for own in nodes]
    assert len({tuple(order) for order in orders}) == len(nodes)
    assert all(sorted(order) == sorted(digests) for order in orders)
    assert Peers(FixedMembership(nodes)).stage_order(digests) == digests


def test_a_machine_that_is_no_node_asks_all():
    nodes = [f"http://10.255.0.{number}:1" for number in range(1, 6)]
    sources = Peers(FixedMembership(nodes), HASTY).sources(INFO, ORIGIN)
    assert [source.name for source in sources] == rank_nodes(INFO.digest, nodes)


def test_a_peer_that_failed_is_passed_over_and_tried_again_later():
    now = 0.0
    with PeerServer({INFO.digest: CONTENT}, 500) as bad, PeerServer({INFO.digest: CONTENT}) as good:
        peers = Peers(Strangers(bad.url, good.url), HASTY, clock=lambda: now)

        def names():
            return {source.name for source in peers.sources(INFO, ORIGIN)}

        assert names() == {bad.url, good.url}
        for source in peers.sources(INFO, ORIGIN):
            if source.name == bad.url:
                with pytest.raises(UnavailableError):
                    source.stream(INFO, 0, len(CONTENT), lambda *_: None)
        assert names() == {good.url}
        now = 1.0
        assert names() == {bad.url, good.url}
        assert names() == {good.url}


def test_a_disk_that_is_full_is_not_held_against_the_peer(peer):
    def full(offset, view):
        raise OSError(28, "No space left on device")

    peers = Peers(Strangers(peer.url), HASTY)
    with pytest.raises(OSError, match="No space left"):
        peers.sources(INFO, ORIGIN)[0].stream(INFO, 0, len(CONTENT), full)
    assert peers.report()[peer.url].num_failed == 0


def test_a_peer_whose_answer_has_a_head_that_drips_is_given_up(monkeypatch):
    monkeypatch.setattr(peer_source, "time", SimpleNamespace(monotonic=count().__next__))  # a second at each reading
    with DrippingServer() as server, pytest.raises(UnavailableError, match="whole head within 4 s"):
        ask(peers_at(server.url))


def test_peers_travel_to_another_process_without_their_record(peer):
    peers = Peers(Strangers(peer.url), HASTY)
    peers.sources(INFO, ORIGIN)[0].record_integrity(intact=False)
    assert peers.sources(INFO, ORIGIN) == []
    copied = pickle.loads(pickle.dumps(peers))
    assert [source.name for source in copied.sources(INFO, ORIGIN)] == [peer.url]


def test_nothing_is_left_open_after_good_and_bad_streams(peer):
    code = f"""
import os
from datasvc.cache.peers.peer_health import PeerHealth
from datasvc.cache.peers.peer_source import PeerSettings, PeerSource
from datasvc.errors import UnavailableError
from datasvc.repository import ObjectInfo
info = ObjectInfo({INFO.digest!r}, {len(CONTENT)})
source = PeerSource({peer.url!r}, {INFO.digest!r}, "/repo", PeerSettings(stall_timeout_s=5), PeerHealth())
before = len(os.listdir("/proc/self/fd"))
def broken(offset, view):
    raise ValueError
source.stream(info, 0, info.size_bytes, lambda *_: None)
for size, sink in ((info.size_bytes + 1, print), (info.size_bytes, broken)):
    try:
        source.stream(ObjectInfo(info.digest, size), 0, size, sink)
    except (UnavailableError, ValueError):
        pass
assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for "node.example" that vouches for itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node.example")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("node.example")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return folder / "cert.pem", folder / "key.pem"


def test_peers_with_tls_are_believed_by_their_certificate_alone(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    trusting = PeerSettings(ca_file=certificate[0], tls_name="node.example", stall_timeout_s=5)
    with PeerServer({INFO.digest: CONTENT}, tls=context) as peer:
        assert ask(peers_at(peer.url, trusting)) == CONTENT
        for settings in (
            PeerSettings(tls_name="node.example"),
            PeerSettings(ca_file=certificate[0], tls_name="other.example"),
            PeerSettings(ca_file=certificate[0]),
        ):
            with pytest.raises(UnavailableError, match="certificate verify failed"):
                ask(peers_at(peer.url, settings))


def test_certificates_that_cannot_be_read_are_an_error_at_the_start(tmp_path):
    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(ConfigError, match=name):
            Peers(FixedMembership(["http://10.255.0.1:1"]), PeerSettings(ca_file=tmp_path / name))


def test_when_the_origin_has_failed_those_that_rank_below_are_asked_for_what_they_have(peer):
    nodes = [peer.url, "http://127.0.0.1:1", "http://127.0.0.1:2"]
    upper, own, lower = rank_nodes(INFO.digest, nodes)
    peers = Peers(FixedMembership(nodes, local_url=own), PATIENT)
    assert [source.name for source in peers.sources(INFO, ORIGIN)] == [upper]
    assert [source.name for source in peers.fallback_sources(INFO, "/repo")] == [lower]


def test_a_fallback_peer_is_told_not_to_fetch_and_is_paused_after_a_failure(peer):
    others = (f"http://node-{number}:1" for number in count())  # One ranks above the peer, whatever port that has.
    own = next(url for url in others if rank_nodes(INFO.digest, [url, peer.url])[0] == url)
    peers = Peers(FixedMembership([own, peer.url], local_url=own), PATIENT)
    (holder,) = peers.fallback_sources(INFO, "/repo")
    content = bytearray()
    holder.stream(INFO, 0, INFO.size_bytes, lambda _, view: content.extend(view))
    assert content == CONTENT
    assert peer.requests == [(INFO.digest, None, {"origin": ["/repo"], "fetch": ["0"], "size": [str(len(CONTENT))]})]
    peer.fault = 503
    for message in ("busy", "so soon after a failure"):
        with pytest.raises(UnavailableError, match=message):
            holder.stream(INFO, 0, INFO.size_bytes, lambda *_: None)
    assert len(peer.requests) == 2


@pytest.mark.parametrize("peer", ["lie"], indirect=True)
def test_a_peer_whose_bytes_are_wrong_gets_a_request_to_check_them(peer):
    (source,) = peers_at(peer.url).sources(INFO, ORIGIN)
    source.record_integrity(intact=False)
    source.record_integrity(intact=True)
    assert peer.checked == [INFO.digest]
