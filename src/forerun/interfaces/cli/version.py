"""`forerun version`."""

from __future__ import annotations

from forerun.common.version import __version__


def version() -> None:
    """Print the version."""
    print(f"forerun {__version__}")
