"""Builds the package with setuptools. It runs the package to compile kernels, so it needs what the package needs."""

from setuptools.build_meta import *  # noqa: F403
from setuptools.config.pyprojecttoml import read_configuration


def _dependencies(settings: object = None) -> list[str]:
    found: list[str] = read_configuration("pyproject.toml", expand=False)["project"]["dependencies"]
    return found


get_requires_for_build_wheel = get_requires_for_build_editable = _dependencies
