"""A million descriptors that nobody sane would send, through the RTL: see `tests.hw.rtl.front.hostile`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from amaranth.back import verilog

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Source
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.queue import NO_EXPONENTS
from plora.hw.defs.status import Status
from plora.hw.rtl.device import NdpDevice
from tests.hw.rtl.front.decoding_core import DecodingCore
from tests.hw.rtl.front.hostile import SLOT_LOG2, Tally, columns_of, expected_statuses, product, run

TINY = preset("tiny")
MEMORY_BYTES = 1 << 20
DECODED = {s for s in Status if s < Status.MEMORY_ERROR} | {Status.BAD_SCALE}
"""What the decoder can say; the rest is said by others."""
LONGEST_WAIT = 100_000
"""Cycles. A chain of the hostile queue holds the device while its host is slow to take completions: CHAIN_TIMEOUT
(a million cycles here) would be the bound for each of its members."""


def front_end(config: NdpConfig) -> RtlDevice:
    """The device with a core that only judges."""
    text = verilog.convert(NdpDevice(config, DecodingCore(config)), name="front_end", emit_src=False)
    return RtlDevice(
        config, verilog=text, top="front_end", dram_bytes=MEMORY_BYTES, read_latency_cycles=4, timeout_cycles=20_000
    )


def report(name: str, tally: Tally) -> None:
    lines = [
        f"{name}: {tally.descriptors} descriptors in {tally.cycles} cycles and {tally.seconds:.0f} s",
        f"{tally.setups_refused} of {tally.setups} set-ups refused",
        f"{tally.chains_closed} chains closed by limit or time",
        f"longest wait of the victim {tally.longest_wait_of_the_victim} cycles",
        str({Status(s).name: n for s, n in sorted(tally.statuses.items())}),
    ]
    print("\n" + "; ".join(lines))


def test_a_million_descriptors_through_the_front_end() -> None:
    with front_end(TINY) as device:
        tally = run(device, TINY, descriptors=1_000_000, a_round=20_000, seed=1, executes=False)
    report("front end", tally)
    assert tally.descriptors >= 1_000_000
    assert {Status(s) for s in tally.statuses} == DECODED
    assert 0.02 < tally.statuses[Status.OK] / tally.descriptors < 0.5
    assert tally.chains_closed > 1000
    assert tally.longest_wait_of_the_victim < LONGEST_WAIT


def test_thousands_of_descriptors_through_the_whole_device() -> None:
    with RtlDevice(TINY, dram_bytes=MEMORY_BYTES, stall=0.1, timeout_cycles=20_000, seed=2) as device:
        tally = run(device, TINY, descriptors=20_000, a_round=1_500, seed=2, executes=True)
    report("whole device", tally)
    # Weights that are too large beside an operand that is not need a wide operand of a chain: rare.
    assert {Status(s) for s in tally.statuses} >= DECODED - {Status.WEIGHTS_TOO_LARGE}
    assert tally.longest_wait_of_the_victim < LONGEST_WAIT


def test_more_queues_and_one_channel() -> None:
    config = replace(TINY, name="narrow", channels=1, queues=5)
    with front_end(config) as device:
        tally = run(device, config, descriptors=30_000, a_round=3_000, seed=3, executes=False)
    report("one channel", tally)
    assert tally.descriptors >= 30_000


@pytest.mark.parametrize(
    ("observed", "believed"),
    [
        ("OK OK OK OK", True),
        ("OK CHAIN_BROKEN CHAIN_ABORTED OK", True),
        ("OK OK CHAIN_BROKEN OK", True),
        ("CHAIN_BROKEN CHAIN_ABORTED CHAIN_ABORTED OK", False),
        ("OK CHAIN_BROKEN OK OK", False),
        ("OK CHAIN_ABORTED CHAIN_ABORTED OK", False),
        ("OK OK OK CHAIN_BROKEN", False),
        ("OK OK CHAIN_BROKEN CHAIN_ABORTED", False),
    ],
)
def test_a_closed_chain_is_believed_only_of_the_members_of_a_chain(observed: str, believed: bool) -> None:
    setup = RingSetup(0, 1 << 18, 16, 0, SLOT_LOG2, 1 << 17, SLOT_LOG2)
    alone = product(TINY, 8, 8, 1, 1 << 16)
    last = replace(alone, source=Source.CHAIN)
    chain = [replace(alone, chain=1), replace(last, chain=1), last, alone]
    seen = [int(Status[name]) for name in observed.split()]
    said = list(expected_statuses(TINY, setup, columns_of(chain), [(0, NO_EXPONENTS)], seen))
    assert (said == seen) == believed
