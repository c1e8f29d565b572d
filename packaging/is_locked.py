"""Exits with 0 where this Python is the one that the lock files are for: CPython 3.11 on Linux on x86-64."""

import platform
import sys

HERE = (platform.python_implementation(), sys.version_info[:2], sys.platform, platform.machine())
sys.exit(HERE != ("CPython", (3, 11), "linux", "x86_64"))
