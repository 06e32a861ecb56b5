import pytest
import torch

from datasvc.errors import NotFoundError, UnavailableError
from datasvc.models.registry.diff import diff
from datasvc.repository import separate_process
from datasvc.repository.separate_process import call_in_process
from tests.models.registry.test_diff import save_state


def diff_in_process(url, a, b):
    return call_in_process(url, "datasvc.models.registry.diff:diff", a, b, command=f"datasvc models diff {a} {b}")


@pytest.mark.slow
def test_another_process_gives_the_same_result(repository):
    a, b = (
        save_state(repository, {"w": torch.full((3,), value), "n": torch.ones(1)}) for value in (1.0, float("inf"))
    )
    assert diff_in_process(repository.url, a, b) == diff(repository, a, b)


def test_the_error_of_the_other_process_is_raised_here(repository):
    a = save_state(repository, {"w": torch.ones(1)})
    with pytest.raises(NotFoundError, match="m has no version 7"):
        diff_in_process(repository.url, a, "m@7")


def test_a_process_that_ends_without_a_result_is_an_error_with_the_command_to_try(repository, monkeypatch):
    monkeypatch.setattr(separate_process, "__name__", "this")  # a module that prints a poem
    with pytest.raises(UnavailableError, match="datasvc models diff m@1 m@2 --repo"):
        diff_in_process(repository.url, "m@1", "m@2")
