"""The public names: `tests/public_names.txt` lists them with their parameters, so that no change goes unnoticed.

`PYTHONPATH=. python tests/test_public_names.py > tests/public_names.txt` writes the list anew.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from pathlib import Path

from datasvc.api import Datasets, Models
from datasvc.api.operation import Operation
from datasvc.models.transfer import transfer, transfer_datasets
from datasvc.shards.ingestion.options import IngestOptions, IngestSettings
from tests.support.pages import find_page
from tools.book.python_api import INTEGRATIONS, read_integrations

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_names.txt")
PACKAGES = [
    "datasvc",
    "datasvc.api",
    "datasvc.cache",
    "datasvc.models",
    "datasvc.runs",
    "datasvc.shards",
    "datasvc.loaders",
    "datasvc.loaders.torch",
    "datasvc.trainer",
    "datasvc.trainer.elastic",
]
# What takes any keyword, and why its parameters cannot be spelt out.
ANY_KEYWORD = {
    "datasvc.ingest": "they are those of `IngestOptions`, which `import datasvc` does not import",
    "datasvc.runs.RunLog.report": "each keyword is a fact of the event",
    "datasvc.trainer.elastic.ObjectState": "each keyword becomes an attribute of the state",
    "datasvc.trainer.elastic.TorchState": "each keyword becomes an attribute of the state",
}


def public_values():
    """Return every public value by its name: those of `__all__`, and the public attributes of classes."""
    values = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            values[f"{package}.{name}"] = value
            if inspect.isclass(value):
                values |= {f"{package}.{name}.{member}": found for member, found in public_members(value)}
    return values


def public_members(value):
    """Return what a class and its bases of this project define, as names and values; methods without `self`."""
    own = [base for base in value.__mro__ if base.__module__.startswith("datasvc")]
    names = {name for base in own for name in vars(base) if not name.startswith("_")}
    # The fields of a data class or named tuple are the parameters of its class.
    for name in sorted(names - set(inspect.signature(value).parameters if fields_of(value) else ())):
        static = inspect.getattr_static(value, name)
        if isinstance(static, Operation):
            yield name, Bound(static.function)
        elif inspect.isfunction(static):
            yield name, Bound(static)
        elif isinstance(static, (classmethod, staticmethod)):
            yield name, getattr(value, name)
        else:
            yield name, None


def fields_of(value):
    return getattr(value, "__dataclass_fields__", None) or getattr(value, "_fields", None)


# Library functions that a command calls and the facade does not, and what a program calls instead.
NOT_ON_THE_FACADE = {
    "describe_log": "JSON values of what `repo.datasets.log(name)` returns",
    "describe_conflicts": "a line of text, of the conflicts that the report has",
    "describe_spread": "a line of text, of a number that the report and the entry have",
    "describe_compression": "a line of text, of what the report and the entry have",
    "unread_pictures": "a line of text, of the ignored files that the report has",
    "summarize_datasets": "`repo.datasets.ls()`",
    "check_target": "`repo.models.export` checks its folder",
    "every_version": "`repo.models.versions(name)`",
    "export_checkpoint": "`repo.models.export(ref, folder, 'safetensors')` writes the same files",
    "load_private_key": "public in `datasvc.models`: it has no repository",
    "make_input": "a tensor: the command makes one from text",
    "make_key": "public in `datasvc.models`: it has no repository",
    "make_model": "a module: the command makes one from text",
    "make_view": "methods of a split: `split.where(...)`, `take`, `weighted` and `balanced`",
    "open_source": "`repo.datasets.ingest` opens the source",
    "parse_name_map": "a dict: the command makes one from text",
    "purged_by_version": "counts that `repo.datasets.describe` has for one version",
    "show_facts": "`repo.models.describe` returns the version",
    "use_text": "a line of text, of the entry that `repo.models.describe` has",
    "thumbnail": "draws on the terminal what `repo.datasets.head` returns",
}


class Bound:
    """A function without its first parameter."""

    def __init__(self, function):
        self.function = function


def parameters_of(value):
    """Return the parameters of a function or class, None for a value that is not called."""
    if isinstance(value, Bound):
        parameters = list(inspect.signature(value.function).parameters.values())
        # The signature of a class has no `self`: its first parameter is the repository.
        return parameters[1:]
    if not callable(value) or getattr(value, "_is_protocol", False):
        return None
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return None  # its signature is that of `Enum`, which differs between releases of Python
    try:
        return list(inspect.signature(value).parameters.values())
    except ValueError:  # an exception class without a constructor of its own
        return None


def described(name, value):
    parameters = parameters_of(value)
    if parameters is None:
        return name
    texts, is_keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            texts.append("*")
        is_keyword_only = parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        texts.append(f"{prefix}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"{name}({', '.join(texts)})"


def public_list():
    listed = [described(name, value) for name, value in public_values().items()]
    return "".join(f"{line}\n" for line in [*listed, *integration_lines()])


def integration_lines():
    """Return the public names of `datasvc.integrations`, from the source: the frameworks need not be installed."""
    for module, (_, nodes) in read_integrations().items():
        for name, node in nodes.items():
            path = f"{INTEGRATIONS}.{module}.{name}"
            if isinstance(node, ast.FunctionDef):
                yield described_node(path, node)
                continue
            members = {member.name: member for member in node.body if isinstance(member, ast.FunctionDef)}
            yield described_node(path, members["__init__"], skip=1) if "__init__" in members else path
            for member in sorted(name for name in members if not name.startswith("_")):
                decorators = {ast.unparse(decorator) for decorator in members[member].decorator_list}
                if "property" in decorators:
                    yield f"{path}.{member}"
                else:
                    yield described_node(f"{path}.{member}", members[member], skip="staticmethod" not in decorators)


def described_node(name, node, *, skip=0):
    """Return a definition as `described` does, without its first `skip` parameters."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    num_required = len(positional) - len(given.defaults)
    texts = [f"{each.arg}{'=' if index >= num_required else ''}" for index, each in enumerate(positional)][skip:]
    texts += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    texts += [
        f"{each.arg}{'' if default is None else '='}"
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    texts += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"{name}({', '.join(texts)})"


def test_the_public_names_and_their_parameters_are_those_of_the_list():
    assert public_list().splitlines() == LIST.read_text(encoding="utf-8").splitlines()


def test_every_module_of_integrations_that_users_import_lists_its_names_and_is_on_the_page():
    page, modules = find_page("integrations.md").read_text(), read_integrations()
    files = {path.stem for path in (ROOT / "datasvc/integrations").glob("*.py")}
    assert files - set(modules) == {"__init__", "run_checkpoints", "tracked_version"}
    for module, (_, nodes) in modules.items():
        (names,) = re.findall(rf"`{module}`: ((?:`\w+`(?:, )?)+)", page)
        listed = set(re.findall(r"`(\w+)`", names))
        assert listed | ({"SplitSource"} if module == "mlflow" else set()) == set(nodes), module


def test_every_public_parameter_is_spelt_out():
    any_keyword = {
        name
        for name, value in public_values().items()
        for parameter in parameters_of(value) or ()
        if parameter.kind is parameter.VAR_KEYWORD
    }
    assert any_keyword == set(ANY_KEYWORD)


def test_calls_that_repeat_a_signature_have_the_parameters_defaults_and_types_of_the_original():
    originals = [inspect.signature(function).parameters.values() for function in (transfer, transfer_datasets)]
    for pull, original in ((Models.pull, originals[0]), (Datasets.pull, originals[1])):
        pull_parameters = [
            parameter
            for name, parameter in inspect.signature(pull).parameters.items()
            if name not in {"self", "origin"}
        ]
        assert pull_parameters == [parameter for parameter in original if parameter.name not in {"source", "target"}]


def test_the_keywords_of_an_ingest_are_its_settings():
    settings = {field.name: field.type for field in dataclasses.fields(IngestSettings)}
    assert {name: hint.__forward_arg__ for name, hint in IngestOptions.__annotations__.items()} == settings
    assert settings.keys() <= inspect.signature(Datasets.ingest).parameters.keys()


def test_the_page_about_python_lists_every_method_of_the_facade():
    rows = [line.split("|") for line in find_page("python.md").read_text().splitlines() if line.startswith("|")]
    for column, facade in enumerate(("Datasets", "Models"), 2):
        listed = {name for row in rows for name in re.findall(r"`(\w+)\(", row[column])}
        prefix = f"datasvc.api.{facade}."
        methods = {name for name, value in public_values().items() if name.startswith(prefix) and value is not None}
        assert {prefix + name for name in listed} == methods


def test_a_method_that_is_a_function_shows_its_arguments_and_its_docstring(repository):
    datasets = importlib.import_module("datasvc.api").Datasets(repository)
    ingest = importlib.import_module("datasvc.shards").ingest
    assert [*inspect.signature(datasets.ingest).parameters] == [*inspect.signature(ingest).parameters][1:]
    assert inspect.getdoc(datasets.ingest) == inspect.getdoc(ingest)


def library_functions(folder):
    """Return the functions of shards, models and gc that the modules of a folder import, by their full names."""
    values = [
        getattr(importlib.import_module(node.module), alias.name)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and re.match(r"datasvc\.(shards|models|gc)\b", node.module)
        for alias in node.names
    ]
    return {f"{value.__module__}.{value.__name__}" for value in values if inspect.isfunction(value)}


def test_the_facade_reaches_every_function_that_a_command_calls():
    commands = library_functions("datasvc/cli/datasets") | library_functions("datasvc/cli/models")
    missing = commands - library_functions("datasvc/api")
    assert {name.rpartition(".")[2] for name in missing} == set(NOT_ON_THE_FACADE)


if __name__ == "__main__":
    sys.stdout.write(public_list())
