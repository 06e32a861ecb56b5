"""One name, one idea: no class name is used for two classes."""

import ast
from collections import defaultdict

from tests.test_imports import MODULES


def test_a_class_name_is_used_for_one_class():
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # torchtitan requires the name `Config` for the settings of each of its classes.
            if isinstance(node, ast.ClassDef) and (module, node.name) != (
                "datasvc.integrations.torchtitan",
                "Config",
            ):
                places[node.name.lstrip("_")].append(f"{module}.{node.name}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
