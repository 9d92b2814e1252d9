"""Lines over a link: occupancy, latency, credits, and sharing."""

from __future__ import annotations

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sim.device.link import BusPath, LinkPort
from plora.sim.hardware.link import load_link, occupancy_ns, one_way_ns, wire_bytes

FULL = preset("full")


def stream(port: LinkPort, lines: int, *, store: bool, memory_cycles: float = 40) -> float:
    """Send lines back to back; the cycle in which the last is answered."""
    answered = 0.0
    for _ in range(lines):
        reached = port.reach(port.depart(0.0, store=store), store=store)
        answered = port.answer(reached + memory_cycles, store=store)
    return answered


@pytest.mark.parametrize("name", ["cxl3.1-x16", "cxl2-x8", "nvlink-c2c"])
@pytest.mark.parametrize("store", [True, False])
def test_a_long_stream_takes_what_its_bytes_take_on_the_wire(name: str, store: bool) -> None:
    link, lines = load_link(name), 5000
    took = stream(LinkPort(link, FULL, credits=lines), lines, store=store)
    size = 64.0 * lines
    wire = wire_bytes(link, write_bytes=size) if store else wire_bytes(link, read_bytes=size)
    assert took == pytest.approx(occupancy_ns(link, wire) + 2 * one_way_ns(link) + 40, rel=0.01)


def test_protocol_bytes_cost_time() -> None:
    link = load_link("cxl3.1-x16")
    with_flits = stream(LinkPort(link, FULL, credits=4000), 4000, store=False)
    payload_only = stream(LinkPort(link, FULL, credits=4000, protocol="none"), 4000, store=False)
    latency = 2 * one_way_ns(link) + 40
    assert payload_only - latency == pytest.approx(4000 * 64 / link.gb_per_s, rel=0.01)
    # A 256-byte flit carries 84.6 % read payload.
    assert (payload_only - latency) / (with_flits - latency) == pytest.approx(0.846, abs=0.01)


def test_credits_limit_what_is_under_way() -> None:
    link = load_link("cxl3.1-x16")
    few = stream(LinkPort(link, FULL, credits=8), 800, store=False)
    round_trip = 2 * one_way_ns(link) + 40
    assert few == pytest.approx(800 / 8 * round_trip, rel=0.03)
    with pytest.raises(UserError, match="credits"):
        LinkPort(link, FULL, credits=0)


def test_two_hosts_on_one_port_share_it_and_on_two_do_not() -> None:
    link, lines = load_link("cxl3.1-x16"), 3000
    alone = stream(LinkPort(link, FULL, credits=lines), lines, store=True)
    shared = LinkPort(link, FULL, credits=2 * lines)
    together = max(stream(shared, lines, store=True), stream(shared, lines, store=True))
    latency = 2 * one_way_ns(link) + 40
    assert together - latency == pytest.approx(2 * (alone - latency), rel=0.01)
    assert shared.down_busy_cycles > 10 * shared.up_busy_cycles > 0


def test_reads_and_writes_use_different_directions_of_a_full_duplex_link() -> None:
    link, lines = load_link("cxl3.1-x16"), 3000
    alone = stream(LinkPort(link, FULL, credits=lines), lines, store=True)
    port = LinkPort(link, FULL, credits=lines)
    answered = 0.0
    for line in range(2 * lines):
        reached = port.reach(port.depart(0.0, store=line % 2 == 0), store=line % 2 == 0)
        answered = port.answer(reached + 40, store=line % 2 == 0)
    assert alone < answered < 1.4 * alone


def test_the_test_bench_has_sixteen_lines_under_way() -> None:
    path = BusPath()
    departed = []
    for _ in range(40):
        departed.append(path.depart(0.0, store=False))
        path.answer(path.reach(departed[-1], store=False) + 100, store=False)
    assert departed[:16] == list(range(16))
    assert departed[16] == departed[0] + 106


def test_weights_read_line_by_line_take_what_a_public_simulator_says() -> None:
    """LLMServingSim, Llama-3.1-8B decode: 6.722 GB from each CXL device at 60 GB/s, 113.47 ms a token."""
    link = load_link("cxl3.1-x16").with_rate(60)
    share = 1000  # of the lines; what is left scales
    lines = int(6.722e9 / 64 / share)
    port = LinkPort(link, FULL, credits=1 << 20, protocol="none")
    nanoseconds = stream(port, lines, store=False) * share
    assert nanoseconds / 1e6 == pytest.approx(113.47, rel=0.02)
