"""Models by name: the reference ones, and whatever a "module:function" of the user's makes."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models.alexnet import alexnet
from datasvc.trainer.recipes.models.googlenet import googlenet
from datasvc.trainer.recipes.models.gpt import gpt, gpt2
from datasvc.trainer.recipes.models.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from datasvc.trainer.recipes.models.small_models import small_cnn
from datasvc.trainer.recipes.models.vgg import vgg16

MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "small-cnn": small_cnn,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg16": vgg16,
    "gpt": gpt,
    "gpt2": gpt2,
}


def build_model(name: str, /, num_classes: int, **options: Any) -> nn.Module:
    """Return a freshly initialised model, its weights drawn from torch's generator.

    Args:
        name: one of `MODELS`, or "module:function" of something that can be imported: it is called as
            `function(num_classes=..., **options)`, so a model's class, or a function of torchvision, does too.
        num_classes: width of the logits; for a model of tokens, the size of its vocabulary.
        options: of the model, as its function names them.

    Raises:
        ConfigError: there is no such model, it cannot be imported, does not take these options, or is no `nn.Module`.
    """
    if num_classes < 1:
        raise ConfigError(f"num_classes is {num_classes}; expected at least 1")
    is_reference = name in MODELS
    function = MODELS[name] if is_reference else _import_function(name)
    _check_accepts(name, function, {"num_classes": num_classes, **options})
    if is_reference:
        _check_types(name, function, options)
    try:
        model = function(num_classes=num_classes, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model {name!r} with {options}: {error}") from error
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}, not called" if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"model {name!r} made {found}; expected a torch.nn.Module")
    return model


def _import_function(name: str) -> Callable[..., Any]:
    """Return what "module:function" names."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f'no model {name!r}; there are: {", ".join(sorted(MODELS))}; one of your own is named "module:function"'
        )
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f'model {name!r} is no "module:function", such as "my_package.models:make_model"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code runs here, and may raise anything
        raise ConfigError(f"model {name!r}: {_say_why_not_imported(module_name, error)}") from error
    function = getattr(module, attribute, None)
    if function is None:
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        known = ", ".join(public[:20]) or "nothing"
        raise ConfigError(f"model {name!r}: module {module_name!r} has no {attribute!r}; it has: {known}")
    if not callable(function):
        raise ConfigError(
            f"model {name!r}: {attribute!r} is of type {type(function).__name__}; expected a function or class"
        )
    return function  # type: ignore[no-any-return]


def _say_why_not_imported(module_name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return (
            f"there is no module {error.name!r}; install it, start where it lies, or put its folder into PYTHONPATH"
        )
    if isinstance(error, SyntaxError):  # it knows the place, which its traceback does not
        return f"importing {module_name!r} failed in {error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"importing {module_name!r} failed in {at.filename}:{at.lineno}: {type(error).__name__}: {error}"


def _check_accepts(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse options before anything is built, so that a TypeError from within a model is not taken for one."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in ones have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        options = [key for key in signature.parameters if key != "num_classes"]
        raise ConfigError(
            f"model {name!r} cannot be called with {', '.join(arguments)}: {error}; "
            f"its options are: {', '.join(options) or 'none'}"
        ) from error


def _check_types(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse a value that is not of its default's type: the text "false" would count as true."""
    parameters = inspect.signature(function).parameters
    for key, value in options.items():
        wanted = type(parameters[key].default)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"model {name!r}: option {key} is {value!r}; expected {wanted.__name__}")
