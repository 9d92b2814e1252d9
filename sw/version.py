"""The version of the installed distribution; pyproject.toml is the one place that states it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from plora.hw.defs.errors import UserError


def plora_version() -> str:
    """Return the version of the installed ``plora`` distribution.

    Raises:
        UserError: the package is imported from a bare checkout that was never installed.
    """
    try:
        return version("plora")
    except PackageNotFoundError:
        raise UserError("plora is not installed: run `pip install -e .` in the repository") from None
