"""CHAIN_LIMIT where it is easily missed: no bound over more descriptors than a counter holds, and one lowered late."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from plora.hw.cosim.rings import PACKED_BYTES, RingLoad, drive_rings, enable
from plora.hw.defs.descriptor import Source
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.registers import global_offset
from plora.hw.defs.status import Status
from tests.hw.rtl.front.hostile import SLOT_LOG2, columns_of, packed, product
from tests.hw.rtl.front.test_hostile import TINY, front_end

WINDOW = 1 << 18
LIMIT = global_offset("CHAIN_LIMIT")


def statuses_of_a_chain(length: int, pokes: list[tuple[int, int]]) -> list[int]:
    """What becomes of one chain of ``length`` descriptors that begins under CHAIN_LIMIT 0, amid register writes."""
    setup = RingSetup(0, WINDOW, 16, 0, SLOT_LOG2, WINDOW // 2, SLOT_LOG2)
    load = RingLoad(0, setup, 1, np.zeros((0, PACKED_BYTES), np.uint8))
    first = replace(product(TINY, 8, 8, 1, WINDOW // 4), chain=1)
    middle = replace(first, source=Source.CHAIN)
    load.descriptors = packed(columns_of([first, *[middle] * (length - 2), replace(middle, chain=0)]))
    with front_end(TINY) as device:
        device.mmio_write(LIMIT, 0)
        assert enable(device, load)
        drive_rings(device, [load], pokes=pokes, seed=1)
    assert load.statuses is not None
    return [int(status) for status in load.statuses]


def test_a_chain_without_bound_outlives_every_counter() -> None:
    assert Counter(statuses_of_a_chain((1 << 16) + 40, [])) == {Status.OK: (1 << 16) + 40}


def test_a_bound_set_below_the_length_of_an_open_chain_closes_it() -> None:
    length = 5000
    # Writes to where nothing is pass the time.
    found = statuses_of_a_chain(length, [*[(0xF000, 0)] * 50, (LIMIT, 5)])
    executed = found.index(Status.CHAIN_BROKEN)
    assert 5 < executed < length - 1, "the bound came before the chain was longer, or after its end: change the pokes"
    assert Counter(found) == {Status.OK: executed, Status.CHAIN_BROKEN: 1, Status.CHAIN_ABORTED: length - executed - 1}
