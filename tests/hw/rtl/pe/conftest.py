"""The compiled PE bench, built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hw.rtl.pe.compiled import Compiled, build


@pytest.fixture(scope="session")
def compiled() -> Iterator[Compiled]:
    bench = Compiled(build())
    yield bench
    bench.close()
