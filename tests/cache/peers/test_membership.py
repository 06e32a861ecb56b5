"""Who the nodes are, in all the ways to say so, while the answer changes."""

import pickle
import socket

import pytest

from datasvc.cache.peers.membership import (
    DnsMembership,
    FileMembership,
    FixedMembership,
    Nodes,
    parse_membership,
    parse_node,
)
from datasvc.errors import ConfigError, UnavailableError
from datasvc.testing import FakeClock

A, B, C = "http://10.255.0.1:8765", "http://10.255.0.2:8765", "http://10.255.0.3:8765"


def replace(path, text):
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def test_a_fixed_list_names_each_node_once_in_one_spelling():
    membership = parse_membership(
        "http://10.255.0.1:8765/, HTTP://10.255.0.2:8765,http://10.255.0.1:8765", local_url=B
    )
    assert membership.nodes() == Nodes((A, B), B)
    assert parse_node("https://Node1.Example:1/") == "https://node1.example:1"
    assert parse_node("http://[FE80::1]:80") == "http://[fe80::1]:80"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1",
        "node1:8765",
        "http://node1",
        "ftp://node1:1",
        "http://:1",
        "http://a:99999",
        "http://a:1/path",
        "http://a:x",
        "http://me@a:1",
        "http://a:1?x=1",
        "http://[::1:1",
        "http://a:0",
        "http://a\n:1",
        "http://a:1,,http://b:1",
        "file:",
        "dns:name",
        "dns:",
    ],
)
def test_what_names_no_node_is_a_clear_error(text):
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT|at least one|cannot read"):
        parse_membership(text)


def test_the_node_of_this_machine_is_found_by_its_address_or_name():
    own = "http://127.0.0.1:8765"
    assert FixedMembership([A, own]).nodes().local_url == own
    assert FixedMembership([A, "http://localhost:1"]).nodes().local_url == "http://localhost:1"
    assert FixedMembership([A, B]).nodes().local_url is None
    assert FixedMembership([A, "http://no-such-host.invalid:1"]).nodes().local_url is None


def test_several_nodes_on_this_machine_need_a_local_url():
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    with pytest.raises(ConfigError, match="give the URL of this node"):
        FixedMembership(urls)
    assert FixedMembership(urls, local_url=urls[1]).nodes().local_url == urls[1]


def test_a_local_url_that_is_not_in_the_list_is_refused():
    with pytest.raises(ConfigError, match=r"10\.255\.0\.3.*the list of nodes"):
        FixedMembership([A, B], local_url=C)


def test_a_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "nodes"
    path.write_text(f"# the first two\n{A}\n\n  {B}  \n")
    membership = parse_membership(f"file:{path}", local_url=A)
    assert membership.nodes() == Nodes((A, B), A)
    replace(path, f"{A}\n{B}\n{C}\n")
    assert membership.nodes() == Nodes((A, B, C), A)
    with path.open("a") as file:
        file.write("http://10.255.0.4:8765\n")
    assert len(membership.nodes().urls) == 4


def test_this_node_may_leave_the_file_and_come_back(tmp_path):
    path = tmp_path / "nodes"
    path.write_text(f"{A}\n{B}\n")
    membership = FileMembership(path, local_url=A)
    replace(path, f"{B}\n")
    assert membership.nodes() == Nodes((B,), None)
    replace(path, f"{A}\n{B}\n")
    assert membership.nodes() == Nodes((A, B), A)


@pytest.mark.parametrize("text", ["", "# nobody\n", f"{A}\nnode2\n", "\0\xff", None])
def test_a_file_that_goes_bad_leaves_the_last_good_list(tmp_path, text):
    path = tmp_path / "nodes"
    path.write_text(f"{A}\n{B}\n")
    membership = FileMembership(path)
    if text is None:
        path.unlink()
    else:
        replace(path, text)
    assert membership.nodes().urls == (A, B)
    replace(path, f"{C}\n")
    assert membership.nodes().urls == (C,)


@pytest.mark.parametrize("text", ["", f"{A}\nnode2\n", None])
def test_a_file_that_is_bad_at_the_start_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "nodes"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        FileMembership(path)


def test_a_name_is_resolved_again_only_after_a_while():
    clock, answers, asked = FakeClock(1000.0), ["10.255.0.1"], []
    membership = DnsMembership(
        "cache.example",
        8765,
        local_url=A,
        interval_s=10,
        clock=clock,
        resolve=lambda name: asked.append(name) or answers,
    )
    answers = ["10.255.0.1", "10.255.0.2"]
    clock.advance(9)
    assert membership.nodes() == Nodes((A,), A)
    clock.advance(1)
    assert membership.nodes() == Nodes((A, B), A)
    assert asked == ["cache.example"] * 2


def test_a_name_server_that_fails_leaves_the_last_addresses():
    clock, failing = FakeClock(1000.0), []

    def resolve(name):
        if failing:
            raise socket.gaierror("no answer")
        return ["10.255.0.1", "fe80::1"]

    membership = DnsMembership("cache.example", 8765, clock=clock, resolve=resolve, scheme="https")
    failing.append(True)
    clock.advance(10)
    assert membership.nodes().urls == ("https://10.255.0.1:8765", "https://[fe80::1]:8765")
    assert membership.nodes().local_url is None


def test_a_node_that_its_name_does_not_list_yet_only_asks():
    assert DnsMembership("cache.example", 8765, local_url=C, resolve=lambda _: ["10.255.0.1"]).nodes() == Nodes(
        (A,), None
    )


def test_a_name_that_does_not_exist_is_an_error_at_the_start():
    with pytest.raises(UnavailableError, match=r"no-such-host\.invalid"):
        parse_membership("dns:no-such-host.invalid:8765")


def test_a_real_name_is_resolved():
    nodes = parse_membership("dns:https://localhost:8765", local_url="https://127.0.0.1:8765").nodes()
    assert nodes.local_url == "https://127.0.0.1:8765"


def test_all_of_them_travel_to_other_processes(tmp_path):
    path = tmp_path / "nodes"
    path.write_text(f"{A}\n{B}\n")
    for membership in (
        parse_membership(f"{A},{B}", local_url=A),
        parse_membership(f"file:{path}", local_url=A),
        DnsMembership("localhost", 1, local_url="http://127.0.0.1:1"),
    ):
        assert pickle.loads(pickle.dumps(membership)).nodes() == membership.nodes()
