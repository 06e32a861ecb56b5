import inspect
import re

from datasvc import errors


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = set(re.findall(r"(\w+Error)\b  +", errors.__doc__))
    real = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if not issubclass(kind, Warning)}
    assert drawn == real


def test_every_error_is_a_datasvc_error_with_a_documented_exit_code():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if not issubclass(kind, Warning)]
    assert all(issubclass(kind, errors.DatasvcError) and kind.exit_code in range(1, 6) for kind in kinds)
