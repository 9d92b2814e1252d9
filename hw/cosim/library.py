"""The C interface of the test bench (`cpp/harness.cpp`): structures field by field, functions by name."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


class Settings(ctypes.Structure):
    """Mirrors `Settings` in `cpp/common.h`."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("memory_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("stall", ctypes.c_uint32),
        ("read_latency_cycles", ctypes.c_uint32),
        ("write_latency_cycles", ctypes.c_uint32),
        ("latency_jitter_cycles", ctypes.c_uint32),
        ("max_bursts", ctypes.c_uint32),
        ("response_order", ctypes.c_uint32),
        ("address_waits_for_data", ctypes.c_uint32),
        ("host_outstanding", ctypes.c_uint32),
        ("host_reorder", ctypes.c_uint32),
        ("host_delay_cycles", ctypes.c_uint32),
        ("timeout_cycles", ctypes.c_uint32),
        ("trace_path", ctypes.c_char_p),
    )


class Counters(ctypes.Structure):
    """Traffic of one memory channel; mirrors `Counters` in `cpp/common.h`."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("read_bursts", "read_beats", "write_bursts", "write_beats"))


_BY_REQUESTER = ctypes.c_uint64 * 3


class Events(ctypes.Structure):
    """Mirrors `Events` in `cpp/common.h`: cycles, by requester (core, host, queues)."""

    _fields_ = tuple(
        (name, _BY_REQUESTER)
        for name in ("first_read_address", "first_read_beat", "last_read_beat", "last_write_committed")
    )


class Window(ctypes.Structure):
    """Mirrors `Window` in `cpp/common.h`."""

    _fields_ = (
        ("first", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("requesters", ctypes.c_uint32),
        ("reads", ctypes.c_uint32),
        ("writes", ctypes.c_uint32),
    )


class Ring(ctypes.Structure):
    """Mirrors `Ring` in `cpp/ring_host.h`."""

    _fields_ = (
        ("submission_base", ctypes.c_uint64),
        ("result_base", ctypes.c_uint64),
        ("queue", ctypes.c_uint32),
        ("depth", ctypes.c_uint32),
        ("submission_log2", ctypes.c_uint32),
        ("result_log2", ctypes.c_uint32),
        ("valid", ctypes.c_uint32),
        ("doorbell", ctypes.c_uint32),
        ("head", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("descriptors", ctypes.c_void_p),
        ("statuses", ctypes.c_void_p),
        ("completed", ctypes.c_uint64),
        ("longest_wait_cycles", ctypes.c_uint64),
    )


class Poke(ctypes.Structure):
    """Mirrors `Poke` in `cpp/ring_host.h`."""

    _fields_ = (("offset", ctypes.c_uint32), ("value", ctypes.c_uint32))


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and declare its functions."""
    library = ctypes.CDLL(str(path))
    self_t, u64, u32, u16 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint16
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ndp_create": (self_t, [ctypes.POINTER(Settings)]),
        "ndp_destroy": (None, [self_t]),
        "ndp_reset": (None, [self_t]),
        "ndp_channels": (ctypes.c_int, []),
        "ndp_run": (ctypes.c_int, [self_t, u64]),
        "ndp_store": (ctypes.c_int, [self_t, u64, ctypes.c_char_p, u64]),
        "ndp_fence": (ctypes.c_int, [self_t]),
        "ndp_load": (ctypes.c_int, [self_t, u64, ctypes.c_char_p, u64]),
        "ndp_mmio_write": (ctypes.c_int, [self_t, u16, u32]),
        "ndp_mmio_read": (ctypes.c_int, [self_t, u16, ctypes.POINTER(u32)]),
        "ndp_fault": (ctypes.c_char_p, [self_t]),
        "ndp_cycle": (u64, [self_t]),
        "ndp_take_store_error": (u32, [self_t, ctypes.POINTER(u64)]),
        "ndp_take_load_error": (u32, [self_t, ctypes.POINTER(u64)]),
        "ndp_mmio_response": (u32, [self_t]),
        "ndp_interrupts": (u64, [self_t]),
        "ndp_interrupt": (None, [self_t, u64, ctypes.POINTER(u64), ctypes.POINTER(u64), ctypes.POINTER(u32)]),
        "ndp_counters": (None, [self_t, ctypes.c_int, ctypes.POINTER(Counters)]),
        "ndp_add_error_range": (None, [self_t, u64, u64]),
        "ndp_add_silence": (None, [self_t, u64, u64, u32, u32]),
        "ndp_events": (None, [self_t, ctypes.POINTER(Events)]),
        "ndp_clear_events": (None, [self_t]),
        "ndp_clear_errors": (None, [self_t]),
        "ndp_set_windows": (None, [self_t, ctypes.POINTER(Window), u64]),
        "ndp_drive_rings": (ctypes.c_int, [self_t, ctypes.POINTER(Ring), u64, ctypes.POINTER(Poke), u64, u64]),
        "ndp_flush": (None, [self_t]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
