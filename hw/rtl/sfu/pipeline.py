"""Delays that keep side-band signals in step with a datapath."""

from __future__ import annotations

from typing import Any

from amaranth import Module, Signal


def delayed(m: Module, name: str, value: Any, cycles: int, *, reset_less: bool = True) -> Any:
    """Return ``value`` as it was ``cycles`` cycles ago; a view of the same shape where it is one."""
    for cycle in range(1, cycles + 1):
        following = Signal(value.shape(), name=f"{name}_{cycle}", reset_less=reset_less)
        m.d.sync += following.eq(value)
        value = following
    return value
