"""The page on troubleshooting quotes messages that the product has."""

import ast
import re

import pytest

from tests.support.pages import ROOT, find_page

MESSAGES = re.findall(r"^\| `([^`]+)` \| .+ \| .+ \|$", find_page("troubleshooting.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def constants():
    """All texts of the product, those of f-strings in parts, without docstrings and comments."""
    texts = []
    for folder in ("datasvc", "loaders", "trainer"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            texts += [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
            ]
    return "\n".join(texts)


def test_there_are_messages_of_every_part():
    assert len(MESSAGES) > 35


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_the_page_quotes_exists(message, constants):
    parts = [part.strip(" ,:;") for part in message.split("...")]
    assert max(map(len, parts)) >= 10
    assert [part for part in parts if part not in constants] == []
