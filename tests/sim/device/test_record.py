"""A host's calls, recorded and played back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.status import Status
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.record import Call, RecordingPort, load_calls, play, save_calls
from plora.sim.device.timed import TimedDevice
from plora.sim.functional.device import FunctionalDevice
from plora.sw.matrix import multiply_twice, store_matrix
from plora.sw.session import open_session

TINY = preset("tiny")
MEMORY_BYTES = 1 << 20


def recording() -> list[Call]:
    """The driver computing y = x A B."""
    port = RecordingPort(FunctionalDevice(TINY, MEMORY_BYTES))
    session = open_session(port, memory_bytes=MEMORY_BYTES, depth=6)
    rng = np.random.default_rng(1)
    a = store_matrix(session.driver, session.allocator, rng.standard_normal((8, 200)).astype(np.float16), "A")
    b = store_matrix(session.driver, session.allocator, rng.standard_normal((70, 8)).astype(np.float16), "B")
    multiply_twice(session.queue, a, b, rng.standard_normal((4, 200)).astype(np.float16))
    port.wait(3000)
    return port.calls


def test_played_back_every_descriptor_completes_in_order() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    played = play(recording(), device, device.memory.read)
    assert [seen.number for seen in played.completions] == list(range(len(played.completions)))
    assert len(played.completions) >= 2
    assert all(seen.status == Status.OK and seen.span_cycles > 0 for seen in played.completions)
    assert played.call_cycles == sorted(played.call_cycles)
    assert played.completions[-1].cycle <= played.call_cycles[-1]


def test_a_slower_memory_completes_later() -> None:
    calls = recording()
    last = []
    for timing in (MemoryTiming(20, 10), MemoryTiming(300, 150)):
        device = TimedDevice(TINY, timing, MEMORY_BYTES)
        last.append(play(calls, device, device.memory.read).completions[-1].cycle)
    assert last[1] > last[0] + 500


def test_a_recording_reads_back_from_its_file(tmp_path: Path) -> None:
    calls = recording()
    save_calls(calls, tmp_path / "calls.jsonl")
    assert load_calls(tmp_path / "calls.jsonl") == calls


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    for text in ("{", "[1, 2]", '["wait", 5, 7, 0]'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a recording"):
            load_calls(path)
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    with pytest.raises(UserError, match="'dance'"):
        play([Call("dance", 1)], device, device.memory.read)
