"""The models are as fast as whole-system runs need them."""

from __future__ import annotations

import pytest

from plora.sim.core.memory import MemoryTiming
from tests.bench.device_rates import MIXES, core_rate, device_work, rate


def test_the_core_model_takes_a_million_descriptors_a_second() -> None:
    assert core_rate() >= 1e6


@pytest.mark.parametrize("mix", list(MIXES))
def test_the_device_model_takes_a_hundred_thousand_descriptors_a_second(mix: str) -> None:
    assert rate(device_work(mix, MemoryTiming(stall=0.1))) >= 1e5
