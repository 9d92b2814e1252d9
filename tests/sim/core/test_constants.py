"""The constants of the cycle model are those of the RTL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sim.core.constants import constant_facts, load_constants


def test_every_constant_is_derived_from_a_file_that_exists(repository: Path) -> None:
    for name, fact in constant_facts().items():
        assert fact.status == "derived", name
        if fact.source.startswith("likewise"):
            continue
        named = re.findall(r"hw/[\w/]+\.(?:py|h)", fact.source)
        assert named, f"{name} names no file"
        assert all((repository / path).is_file() for path in named), f"{name}: {named}"


def test_constants_that_the_rtl_states_itself_agree() -> None:
    pytest.importorskip("amaranth")
    from plora.hw.defs.registers import MAX_BACKOFF_LOG2
    from plora.hw.rtl.core.bursts import PAGE_WORDS
    from plora.hw.rtl.core.channel_reader import BURSTS_IN_FLIGHT
    from plora.hw.rtl.core.decoder import Decoder
    from plora.hw.rtl.core.job import FINISHED, JOB_SLOTS, RECORDS
    from plora.hw.rtl.core.weight_reader import longest_burst
    from plora.hw.rtl.front.queue_engine import WRITERS
    from plora.hw.rtl.front.slot_reader import READERS
    from plora.hw.rtl.pe.array import PeArray
    from plora.hw.rtl.sfu.p_scaler import PScaler
    from plora.hw.rtl.sfu.sfu import Sfu

    c = load_constants()
    for name in ("tiny", "small", "full"):
        config = preset(name)
        assert Decoder(config).cycles == c.decode + 1
        assert PeArray(config, tag_bits=1).latency == c.array
        assert (c.softmax, c.softmax_settle, c.p_scaler) == (Sfu.LATENCY, Sfu.SETTLE, PScaler.LATENCY)
        assert longest_burst(config) == min(c.page_words, config.dram_buffer_stripes // c.burst_share)
    assert (c.job_slots, c.records, c.finished) == (JOB_SLOTS, RECORDS, FINISHED)
    assert (c.page_words, c.bursts_in_flight) == (PAGE_WORDS, BURSTS_IN_FLIGHT)
    assert (c.slot_reads, c.completion_writes, c.backoff_log2) == (READERS, WRITERS, MAX_BACKOFF_LOG2)


def test_a_file_with_an_unknown_or_broken_constant_is_refused(tmp_path: Path, repository: Path) -> None:
    text = (repository / "sim" / "core" / "data" / "core.toml").read_text()
    for change in (("decode =", "decoder ="), ("value = 14", "value = 14.5"), ("value = 14", "value = -1")):
        path = tmp_path / "core.toml"
        path.write_text(text.replace(*change, 1))
        load_constants.cache_clear()
        with pytest.raises(UserError, match="decode"):
            load_constants(path)
    load_constants.cache_clear()
