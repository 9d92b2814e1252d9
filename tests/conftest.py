"""Settings and fixtures that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

# The same cases on every run and machine; a slow machine is not a failure.
settings.register_profile(
    "plora",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("plora")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Files that tests read and that belong to the repository."""
    return REPOSITORY / "tests" / "fixtures"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public reference data that is not part of the repository: skips visibly where it is absent."""
    folder = Path(os.environ.get("PLORA_SHARED_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set PLORA_SHARED_DATA to a folder that holds it")
    return folder
