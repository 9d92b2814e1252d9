"""The costs that the system model charges for a descriptor are those that were measured on the RTL."""

from __future__ import annotations

from plora.hw.defs.config import preset
from plora.sim.system.costs import presets
from plora.sim.system.overhead import measured_overhead


def test_the_priced_costs_are_the_measured_ones() -> None:
    priced, measured = presets()["priced"], measured_overhead()
    ns_per_cycle = 1000 / preset(measured.preset).clock_mhz
    for one in measured.descriptors:
        assert priced.number("command_ns") == one.times.doorbell_to_first_word * ns_per_cycle
        assert priced.number("descriptor_bytes") == one.link_bytes["submission_bytes"]
        assert priced.number("flag_bytes") == one.link_bytes["completion_bytes"]
        assert one.link_bytes_interrupt["poll_bytes"] == 0
