"""Imports functions of the user, which settings name as "module:function"."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from datasvc.errors import ConfigError


def import_function(reference: str, *, what: str) -> Callable[..., Any]:
    """Return the function or class "module:function".

    Args:
        reference: module and function.
        what: what the function is used as, for error messages, such as "model".

    Raises:
        ConfigError: `reference` has another form, its module cannot be imported, or it has no such function.
    """
    module_name, _, attribute = reference.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(
            f'{what} {reference!r} is not "module:function"; write for example "my_package.models:make_model"'
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code runs here and can raise anything
        raise ConfigError(f"{what} {reference!r}: {_describe_import_error(module_name, error)}") from error
    function = getattr(module, attribute, None)
    if function is None:
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        choices = ", ".join(public[:20]) or "no functions"
        raise ConfigError(f"{what} {reference!r}: module {module_name!r} has no {attribute!r}; it has {choices}")
    if not callable(function):
        raise ConfigError(
            f"{what} {reference!r}: {attribute!r} is of type {type(function).__name__}; expected a function or class"
        )
    return function  # type: ignore[no-any-return]


def _describe_import_error(module_name: str, error: Exception) -> str:
    # The module itself, or a package above it, is missing. A missing module that it imports is reported at the end.
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return f"there is no module {error.name!r}; install it, start in its folder, or add that folder to PYTHONPATH"
    if isinstance(error, SyntaxError):  # the position is in the exception, not in its traceback
        return f"importing {module_name!r} failed in {error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"importing {module_name!r} failed in {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
