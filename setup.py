"""Compiles Forerun's kernels when the package is built, so that its first command need not wait for a compiler.

Everything else about the package stands in pyproject.toml.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class WithKernels(build_py):
    """Copies the package, then writes object code beside it; beside the sources for an editable install."""

    def run(self) -> None:
        super().run()
        root = Path("src" if self.editable_mode else self.build_lib).resolve()
        version = self.distribution.get_version()
        with TemporaryDirectory() as installed:
            # The package asks for its version, which an installer writes only later.
            metadata = Path(installed) / f"forerun-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: forerun\nVersion: {version}\n")
            paths = [str(root), installed, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            built = subprocess.run([sys.executable, "-m", "forerun.common.build_ahead"], env=environment)
        if built.returncode:
            print("forerun: kernels were not compiled; numba compiles them when they are first called", file=sys.stderr)


class ForThisMachine(bdist_wheel):
    """Names the machine in the name of the wheel, and no version of Python: object code does not depend on it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class HasObjectCode(Distribution):
    """A package that is not the same on every machine."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": WithKernels, "bdist_wheel": ForThisMachine}, distclass=HasObjectCode)
