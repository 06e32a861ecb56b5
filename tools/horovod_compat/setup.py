"""Refuses to be built for an environment that has the real Horovod; the rest is in pyproject.toml.

pip builds with the interpreter of the environment that it installs into, so sysconfig leads there although the build
itself is isolated. Other installers, ``pip install --target`` and ready-made wheels escape this check. They overwrite
nothing either, because `horovod.py` is no folder; it makes the check again when it is imported.
"""

import importlib.metadata
import site
import sysconfig

from setuptools import setup

folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
for found in importlib.metadata.distributions(name="horovod", path=folders):
    raise SystemExit(
        f"cannot install datasvc-horovod: Horovod {found.version} is in {found.locate_file('')}, and both are "
        "imported as horovod; remove it first: pip uninstall horovod"
    )

setup()
