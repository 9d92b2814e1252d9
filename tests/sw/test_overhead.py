"""What a descriptor costs beside its work, measured again on the smallest device."""

from __future__ import annotations

import json

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.queue import LINE_BYTES
from plora.sim.system.overhead import measured_overhead
from plora.sw import overhead_run
from plora.sw.cli import main


def test_the_committed_figures_are_those_of_the_rtl_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cycles before and after the work are the same at every size of the device; the work itself is not."""
    committed = measured_overhead()
    monkeypatch.setattr(overhead_run, "SHAPES", overhead_run.SHAPES[:2])
    assert main(["rtl", "overhead", "--preset", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for one, other in zip(found["descriptors"], committed.descriptors, strict=False):
        for name in ("doorbell_to_first_word", "last_word_to_completion", "result_to_completion"):
            assert one["times"][name] == getattr(other.times, name), name
        assert one["read_latencies_before"] == one["write_latencies_after"] == 2
        for name in ("submission_bytes", "operand_bytes", "result_bytes", "completion_bytes", "mmio_bytes"):
            assert one["link_bytes"][name] == other.link_bytes[name], name
        assert one["link_bytes_interrupt"]["poll_bytes"] == 0
        assert one["link_bytes"]["poll_bytes"] % LINE_BYTES == 0


def test_the_shapes_fit_every_preset() -> None:
    for name in ("tiny", "small", "full"):
        config = preset(name)
        for rows, columns, batch in overhead_run.SHAPES:
            assert columns <= config.input_half_stripes * config.stripe_values and rows * batch <= 128
