"""Compiles Forerun's kernels when the package is built, so that its first command need not wait for a compiler.

It also writes the man pages, which a wheel installs into share/man/man1.

Everything else about the package stands in pyproject.toml.
"""

import os
import subprocess
import sys
from distutils.command.install_data import install_data  # setuptools has its own distutils
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def run_package(root: Path, distribution: Distribution, *arguments: str) -> int:
    """Runs Python on the package in `root` and returns its exit code.

    The package asks for its version, which an installer writes only later.
    """
    version = distribution.get_version()
    with TemporaryDirectory() as installed:
        metadata = Path(installed) / f"forerun-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: forerun\nVersion: {version}\n")
        paths = [str(root.resolve()), installed, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, *arguments], env=environment).returncode


class WithKernels(build_py):
    """Copies the package, then writes object code beside it; beside the sources for an editable install."""

    def run(self) -> None:
        super().run()
        root = Path("src" if self.editable_mode else self.build_lib)
        if run_package(root, self.distribution, "-m", "forerun.common.build_ahead"):
            print("forerun: kernels were not compiled; numba compiles them when they are first called", file=sys.stderr)


class WithManPages(install_data):
    """Installs the man pages of all commands."""

    def run(self) -> None:
        built = Path(self.get_finalized_command("build").build_lib)
        root = built if (built / "forerun").is_dir() else Path("src")
        with TemporaryDirectory() as pages:
            if run_package(root, self.distribution, "docs/write_man.py", pages):
                print("forerun: its man pages were not written", file=sys.stderr)
            self.data_files = [("share/man/man1", sorted(map(str, Path(pages).iterdir())))]
            super().run()


class ForThisMachine(bdist_wheel):
    """Names the machine in the name of the wheel, and no version of Python: object code does not depend on it."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class HasObjectCode(Distribution):
    """A package that is not the same on every machine."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": WithKernels, "install_data": WithManPages, "bdist_wheel": ForThisMachine},
    data_files=[("share/man/man1", [])],
    distclass=HasObjectCode,
)
