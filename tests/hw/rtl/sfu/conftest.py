"""The compiled bench, built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hw.rtl.sfu.compiled import SfuUnits, build


@pytest.fixture(scope="session")
def units() -> Iterator[SfuUnits]:
    bench = SfuUnits(build())
    yield bench
    bench.close()
