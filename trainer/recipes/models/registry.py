"""Models by name: the reference models, and models of the user by "module:function"."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.models.convolutional import VGG16, AlexNet, keyword_cnn, small_cnn
from datasvc.trainer.recipes.models.googlenet import GoogLeNet
from datasvc.trainer.recipes.models.gpt import GPT, gpt2, gpt2_medium
from datasvc.trainer.recipes.models.inception import InceptionV3
from datasvc.trainer.recipes.models.resnet import BottleneckBlock, ResidualBlock, ResNet

MODELS: Final[dict[str, Callable[..., nn.Module]]] = {
    "small-cnn": small_cnn,
    "keyword-cnn": keyword_cnn,
    # The number after a model is its number of parameters with 1000 classes.
    "resnet18": functools.partial(ResNet, ResidualBlock, (2, 2, 2, 2)),  # 11,689,512
    "resnet34": functools.partial(ResNet, ResidualBlock, (3, 4, 6, 3)),  # 21,797,672
    "resnet50": functools.partial(ResNet, BottleneckBlock, (3, 4, 6, 3)),  # 25,557,032, in 161 tensors
    "resnet101": functools.partial(ResNet, BottleneckBlock, (3, 4, 23, 3)),  # 44,549,160
    "resnet152": functools.partial(ResNet, BottleneckBlock, (3, 8, 36, 3)),  # 60,192,808
    "alexnet": AlexNet,
    "googlenet": GoogLeNet,
    "inception-v3": InceptionV3,
    "vgg16": VGG16,
    "gpt": GPT,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
}


def build_model(name: str, /, num_classes: int, **options: Any) -> nn.Module:
    """Return a new model; its initial weights come from torch's global generator.

    Args:
        name: one of `MODELS`, or "module:function": a function or class that is called as
            `function(num_classes=..., **options)`.
        num_classes: number of classes; for a language model, the size of the vocabulary.
        options: keyword arguments of the function.

    Raises:
        ConfigError: there is no such model, its module cannot be imported, its function does not take these options,
            or the result is not an `nn.Module`.
    """
    if num_classes < 1:
        raise ConfigError(f"num_classes is {num_classes}; expected at least 1")
    # Only options of the reference models are checked by type: those of a user's function may accept several types.
    is_reference = name in MODELS
    if not is_reference and ":" not in name:
        raise ConfigError(
            f'there is no model {name!r}; expected one of {", ".join(sorted(MODELS))}, or "module:function"'
        )
    function = MODELS[name] if is_reference else import_function(name, what="model")
    _check_accepts(name, function, {"num_classes": num_classes, **options})
    if is_reference:
        _check_types(name, function, options)
    try:
        model = function(num_classes=num_classes, **options)
    except ConfigError:  # is a ValueError too, but its message needs no addition
        raise
    except ValueError as error:
        raise ConfigError(f"model {name!r} with {options}: {error}") from error
    if not isinstance(model, nn.Module):
        result = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"model {name!r} returned {result}; expected an instance of torch.nn.Module")
    return model


def _check_accepts(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check options against the signature, because a TypeError of the call could also come from inside the model."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
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
    """Check that each value has the type of its default. Otherwise the string "false" would count as true."""
    parameters = inspect.signature(function).parameters
    for key, value in options.items():
        expected = type(parameters[key].default)
        # Not `isinstance`: True would count as an int. An int is accepted for a float.
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise ConfigError(f"model {name!r}: option {key} is {value!r}; expected {expected.__name__}")


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
