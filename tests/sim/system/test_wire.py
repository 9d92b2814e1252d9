from __future__ import annotations

import pytest

from plora.sim.hardware.link import load_links, wire_bytes
from plora.sim.system.wire import wire_of

LINKS = load_links()
SIZES = [1, 26, 63, 64, 65, 255, 256, 257, 4096, 999_999, 1 << 20]


@pytest.mark.parametrize("name", sorted(LINKS))
@pytest.mark.parametrize("protocol", ["none", "flit"])
def test_coefficients_agree_with_the_link_model(name: str, protocol: str) -> None:
    link = LINKS[name]
    wire = wire_of(link, protocol)  # type: ignore[arg-type]
    for size in SIZES:
        read = wire_bytes(link, read_bytes=size, protocol=protocol)  # type: ignore[arg-type]
        write = wire_bytes(link, write_bytes=size, protocol=protocol)  # type: ignore[arg-type]
        assert wire.read(size) == pytest.approx((read.down, read.up)), f"{name}: read of {size}"
        assert wire.write(size) == pytest.approx((write.down, write.up)), f"{name}: write of {size}"
