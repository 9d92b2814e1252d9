"""The compiled benches, built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hw.rtl.pe.compiled import Product, Units, build_product, build_units


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    bench = Product(build_product())
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def units() -> Iterator[Units]:
    bench = Units(build_units())
    yield bench
    bench.close()
