"""The whole core in Amaranth's simulator: the same checks as on Verilator, on the fewest beats that show much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import DType, Keep, Source
from plora.hw.defs.status import Status
from tests.hw.rtl.core.bench import TINY
from tests.hw.rtl.core.system import GRUMPY, IDEAL, Mood, System, attention_steps, step

ONE_CHANNEL = replace(TINY, name="tiny-1", channels=1)


@pytest.mark.parametrize(("config", "mood"), [(TINY, GRUMPY), (ONE_CHANNEL, IDEAL)], ids=["tiny", "one-channel"])
def test_chains_sums_and_refusals_give_the_bytes_of_the_functional_core(config: NdpConfig, mood: Mood) -> None:
    rng = np.random.default_rng(config.channels)
    system = System(config, slot_bytes=1 << 13)
    steps = [
        step(config, rng, 5, 70, 3, name="tails in every dimension"),
        step(config, rng, 1, 300, 1, name="K split over the channels, where there are several"),
        step(config, rng, 32, 40, 3, chain=1, keep=Keep.NEW, name="kept"),
        step(config, rng, 9, 40, 3, first=False, chain=1, source=Source.CHAIN, keep=Keep.APPEND, name="appended"),
        step(config, rng, 3, 41, 3, first=False, source=Source.KEPT, name="product of the kept"),
        step(config, rng, 2, 70, 1, dtype=2, name="refused"),
        step(config, rng, 1, 40, 2, chain=1, acc_out=1, name="sums left"),
        step(config, rng, 1, 33, 2, first=False, acc_in=1, name="sums taken up"),
        step(config, rng, 21, 8, 1, kind="bits", name="four rows in a word"),
        *attention_steps(config, rng, dims=16, rows=3, tiles=[32, 9], value_dims=5, spare_stripes=1),
        *attention_steps(config, rng, dims=33, rows=1, tiles=[40], value_dims=1, v_tiles=[32, 8]),
        *attention_steps(config, rng, dims=33, rows=3, tiles=[40], value_dims=5, spare_stripes=1, dtype=DType.INT8),
        *attention_steps(config, rng, dims=33, rows=2, tiles=[70], value_dims=3, dtype=DType.INT4),
    ]
    for one in steps:
        system.add(one)
    run = system.run(mood)
    refused = [outcome.status for outcome in run.outcomes if outcome.status is not Status.OK]
    assert refused == [Status.BAD_DTYPE]
