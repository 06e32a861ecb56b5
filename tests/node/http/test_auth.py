"""Tokens: where they come from, and whom they let in."""

import pytest

from datasvc.errors import ConfigError
from datasvc.node.http.auth import check_exposure, is_authorized, is_loopback, load_token

TOKEN = "0123456789abcdef"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def test_a_token_comes_from_its_file_before_the_environment(token_file):
    assert load_token(token_file, "another-token-of-16") == TOKEN
    assert load_token(None, f" {TOKEN} ") == TOKEN
    assert load_token(None, None) is None


def test_a_token_file_that_is_too_large_is_refused(token_file):
    token_file.write_text("a" * 4097)
    with pytest.raises(ConfigError, match="more than 4096 characters"):
        load_token(token_file, None)


def test_a_token_file_that_everybody_can_read_is_refused(token_file):
    token_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(token_file, None)


@pytest.mark.parametrize("text", ["", "short", "two words of a long token", "umlaut-äöü-äöü-äöü", "new\nline" * 4])
def test_a_token_that_is_no_secret_is_refused(text, token_file):
    with pytest.raises(ConfigError, match="openssl rand"):
        load_token(None, text)
    token_file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="token"):
        load_token(token_file, None)


def test_a_token_file_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        load_token(tmp_path / "missing", None)


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        (TOKEN, False),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        ("Bearer \udcff", False),
        ("Bearer ä", False),
    ],
)
def test_only_the_token_itself_lets_in(header, allowed):
    assert is_authorized(header, TOKEN) is allowed


def test_without_a_token_everybody_who_can_connect_is_let_in():
    assert is_authorized(None, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node1", "localhost.example.org", "fe80::1"])
def test_any_other_address_needs_one(host):
    with pytest.raises(ConfigError, match="--token-file"):
        check_exposure(host, None)
    check_exposure(host, TOKEN)
