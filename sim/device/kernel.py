"""The device in time: queue engine, core and memory channels, as one walk from decision to decision.

The walk itself is C++ (``cpp/``), compiled at first use, because a descriptor takes a hundred small steps
and a system run has millions of descriptors. This module gives it the device's sizes and constants, and
carries descriptors in and completions out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.registers import RESET_CHAIN_TIMEOUT, RESET_POLL_INTERVAL, RESET_SHARE
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Demand, Demands
from plora.sim.core.memory import MemoryTiming
from plora.sim.core.waits import TABLE, geometric, largest_normal, stream_waits
from plora.sim.native import open_library

_CPP = Path(__file__).parent / "cpp"
_SOURCES = tuple(_CPP / name for name in ("kernel.cpp", "engine.h", "core.h", "channels.h", "constants.h"))

_CONFIG = ("channels", "instruction_buffer_depth", "dram_buffer_stripes", "input_buffer_stripes")
_ENTRIES = (
    *("job_slots", "records", "finished", "request_queue", "bursts_in_flight", "page_words", "burst_share"),
    *("slot_reads", "completion_writes", "backoff_log2"),
)
_CYCLES = (
    *("instruction_buffer", "decode", "burst_cut", "burst_skip", "burst_request", "rendezvous", "grant", "array"),
    *("collect", "queue", "retire", "write_start", "line_queue", "write_end", "read_return", "write_return"),
    *("engine_job", "slot_arrived"),
    "acknowledged",
)
_MEMORY = ("read_latency", "write_latency", "beat_cycles", "wait_one", "wait_pair", "wait_mean", "wait_spread")


class _Settings(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_CONFIG, *_ENTRIES)),
        *((name, ctypes.c_double) for name in (*_CYCLES, *_MEMORY)),
        ("waits", ctypes.c_void_p),
        ("waits_known", ctypes.c_int64),
        ("share", ctypes.c_int64),
        ("poll_interval", ctypes.c_double),
        ("chain_timeout", ctypes.c_double),
    )


class _Demand(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in Demand._fields)


COMPLETION = np.dtype(
    [(name, np.int64) for name in ("queue", "number", "tag")]
    + [(name, np.float64) for name in ("fetched", "first_beat", "last_beat", "completed")]
)
"""A completed descriptor: its queue, its number since enabling, its tag; cycles in which the core took it, of its
first and last beat (infinite if it was refused), and in which its completion line is in memory."""

_INTERRUPT = np.dtype([("cycle", np.float64), ("queue", np.int64)])
_ROOM = 4096
_SHARE_MASK = 0xFFFF

NEVER = inf
"""A poll interval or chain timeout that does not end within a run."""


@dataclass(frozen=True)
class RingPlace:
    """Where a queue's rings lie, in 64-byte lines from DPA 0, and their slots."""

    depth: int
    submission_line: int
    submission_lines: int
    """Lines of a slot."""
    result_line: int
    result_lines: int
    interrupts: bool = False
    weight: int = 1
    """Slots read in one turn before another queue has its own."""


class Unresolved(NamedTuple):
    """A published descriptor whose demand the walk needs now; ``number`` counts from the enabling of its queue."""

    queue: int
    number: int
    tag: int
    broken: int
    """1: it belongs to a chain that was closed because it came too late."""


def _open() -> ctypes.CDLL:
    library = open_library("device", _SOURCES)
    self_t, i64, f64, i32, pointer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "plora_create": (self_t, [ctypes.POINTER(_Settings)]),
        "plora_destroy": (None, [self_t]),
        "plora_enable": (None, [self_t, i64, i64, i64, i64, i64, i64, i64, i32, f64]),
        "plora_set_registers": (None, [self_t, f64, f64, i64]),
        "plora_disable": (None, [self_t, i64]),
        "plora_busy": (i32, [self_t, i64]),
        "plora_publish": (None, [self_t, i64, i64, i64, f64, i64, pointer, pointer, pointer]),
        "plora_publish_unresolved": (None, [self_t, i64, i64, f64, i64]),
        "plora_resolve": (None, [self_t, i64, i64, i32, ctypes.POINTER(_Demand)]),
        "plora_doorbell": (None, [self_t, i64, f64]),
        "plora_take": (None, [self_t, i64, i64, f64]),
        "plora_load_line": (f64, [self_t, i64, f64]),
        "plora_store_line": (f64, [self_t, i64, f64]),
        "plora_advance": (f64, [self_t, f64, pointer]),
        "plora_completions": (i64, [self_t, pointer, i64]),
        "plora_interrupts": (i64, [self_t, pointer, i64]),
        "plora_words_read": (i64, [self_t]),
        "plora_words_written": (i64, [self_t]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class DeviceKernel:
    """A device from reset. Cycles are those of its clock; calls must come in the order of the cycles they speak of.

    Parameters:
        config: sizes of the device.
        timing: its memory.
        poll_interval_cycles, chain_timeout_cycles: the registers of these names; `NEVER` for none.

    Raises:
        UserError: there is no C++ compiler.
    """

    def __init__(
        self,
        config: NdpConfig,
        timing: MemoryTiming,
        *,
        poll_interval_cycles: float = RESET_POLL_INTERVAL,
        chain_timeout_cycles: float = RESET_CHAIN_TIMEOUT,
    ) -> None:
        self._handle: int | None = None
        self._library = _open()
        self.config = config
        self.timing = timing
        constants = load_constants()
        p = timing.stall
        # Kept: the walk reads it as long as it lives.
        self._waits = stream_waits(p, config.channels)
        settings = _Settings(
            **{name: getattr(config, name) for name in _CONFIG[:-1]},
            input_buffer_stripes=2 * config.input_half_stripes,
            **{name: getattr(constants, name) for name in (*_ENTRIES, *_CYCLES)},
            read_latency=timing.read_latency_cycles,
            write_latency=timing.write_latency_cycles,
            beat_cycles=timing.beat_cycles,
            wait_one=geometric(p),
            wait_pair=geometric(p, 2),
            wait_mean=p / (1.0 - p),
            wait_spread=largest_normal(config.channels) * p**0.5 / (1.0 - p),
            waits=self._waits.ctypes.data,
            waits_known=TABLE,
            share=RESET_SHARE & _SHARE_MASK,
            poll_interval=poll_interval_cycles,
            chain_timeout=chain_timeout_cycles,
        )
        self._handle = self._library.plora_create(ctypes.byref(settings))
        self._asked = (ctypes.c_int64 * 4)()
        self._completions = np.empty(_ROOM, COMPLETION)
        self._interrupts = np.empty(_ROOM, _INTERRUPT)

    def __del__(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.plora_destroy(handle)

    def enable(self, queue: int, place: RingPlace, cycle: float) -> None:
        """Enable a queue with empty rings: its first slot is looked at from ``cycle`` on."""
        self._library.plora_enable(
            self._handle,
            queue,
            place.depth,
            place.submission_line,
            place.submission_lines,
            place.result_line,
            place.result_lines,
            place.weight,
            place.interrupts,
            cycle,
        )

    def set_registers(self, *, poll_interval_cycles: float, chain_timeout_cycles: float, share: int) -> None:
        """Change the registers POLL_INTERVAL, CHAIN_TIMEOUT and SHARE; a poll interval is at least a cycle.

        Only the core's part of SHARE is modeled.
        """
        core_words = share & _SHARE_MASK
        self._library.plora_set_registers(
            self._handle, max(1.0, poll_interval_cycles), chain_timeout_cycles, core_words
        )

    def disable(self, queue: int) -> None:
        """Disable a queue: what it has under way ends without a completion."""
        self._library.plora_disable(self._handle, queue)

    def busy(self, queue: int) -> bool:
        """Whether a queue, enabled or disabled, has work under way; then it must not be enabled again."""
        return bool(self._library.plora_busy(self._handle, queue))

    def publish(
        self,
        queue: int,
        first: int,
        demands: Demands | Sequence[Demand],
        *,
        published: float,
        tag: int,
        chain: npt.NDArray[np.bool_] | Sequence[bool] | None = None,
        refused: npt.NDArray[np.bool_] | Sequence[bool] | None = None,
    ) -> None:
        """Put descriptors into the slots from number ``first`` (since enabling) on, there from cycle ``published`` on.

        ``chain`` says which go on with the next, ``refused`` which the device will refuse (their demands do not
        matter). Tags count up from ``tag`` and come back with the completions.
        """
        count = len(demands)
        if isinstance(demands, Demands):
            table = np.stack([getattr(demands, name) for name in Demand._fields], axis=1)
        else:
            table = np.array(demands, np.int64).reshape(count, len(Demand._fields))
        table = np.ascontiguousarray(table, np.int64)
        flags = [
            np.zeros(count, np.uint8) if flag is None else np.ascontiguousarray(flag, np.uint8)
            for flag in (chain, refused)
        ]
        self._library.plora_publish(
            self._handle,
            queue,
            first,
            count,
            published,
            tag,
            table.ctypes.data,
            *(flag.ctypes.data for flag in flags),
        )

    def publish_unresolved(self, queue: int, number: int, *, published: float, tag: int) -> None:
        """Put a descriptor into slot ``number``; `advance` asks what it demands when the device reads it."""
        self._library.plora_publish_unresolved(self._handle, queue, number, published, tag)

    def resolve(self, wanted: Unresolved, demand: Demand | None, *, chain: bool) -> None:
        """Answer `advance`: what the descriptor demands, or None if the device refuses it."""
        made = None if demand is None else ctypes.byref(_Demand(*demand))
        self._library.plora_resolve(self._handle, wanted.queue, wanted.number, chain, made)

    def ring_doorbell(self, queue: int, cycle: float) -> None:
        """A doorbell takes effect in ``cycle``."""
        self._library.plora_doorbell(self._handle, queue, cycle)

    def take(self, queue: int, head: int, cycle: float) -> None:
        """The host's word that it has taken ``head`` completions in all is at the queue engine in ``cycle``."""
        self._library.plora_take(self._handle, queue, head, cycle)

    def load_line(self, line: int, cycle: float) -> float:
        """The host reads line ``line`` (DPA / 64); it leaves the host port in ``cycle``. Cycle in which it is there."""
        return float(self._library.plora_load_line(self._handle, line, cycle))

    def store_line(self, line: int, cycle: float) -> float:
        """The host writes line ``line``; it leaves the host port in ``cycle``. Cycle in which it is in memory."""
        return float(self._library.plora_store_line(self._handle, line, cycle))

    def advance(self, present: float) -> float | Unresolved:
        """Follow the device up to cycle ``present``: the cycle of the next thing known to happen, infinite if idle.

        Where a descriptor is to be handed over that `publish_unresolved` put there, that one instead: call
        `resolve`, then `advance` again.
        """
        following = self._library.plora_advance(self._handle, present, ctypes.byref(self._asked))
        if self._asked[0] >= 0:
            return Unresolved(*self._asked)
        return float(following)

    def completions(self) -> npt.NDArray[np.void]:
        """What was completed since the last call, in order; see `COMPLETION`."""
        return self._drain(self._library.plora_completions, self._completions)

    def interrupts(self) -> npt.NDArray[np.void]:
        """Interrupts sent since the last call: fields ``cycle`` and ``queue``."""
        return self._drain(self._library.plora_interrupts, self._interrupts)

    def _drain(self, function: Any, room: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        parts = []
        while count := function(self._handle, room.ctypes.data, len(room)):
            parts.append(room[:count].copy())
            if count < len(room):
                break
        return np.concatenate(parts) if parts else room[:0].copy()

    @property
    def words_read(self) -> int:
        """64-byte words read from memory."""
        return int(self._library.plora_words_read(self._handle))

    @property
    def words_written(self) -> int:
        """64-byte words written to memory."""
        return int(self._library.plora_words_written(self._handle))
