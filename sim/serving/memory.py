"""What occupies memory while requests are served: KV blocks, and adapters where they live in HBM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.system.work import IntArray


@dataclass
class Blocks:
    """KV blocks of `size` tokens; `capacity` of them exist (None: as many as are asked for).

    `reserved` blocks' worth of the same memory is taken by adapters. `squeeze` is called whenever there
    may be less room than before, for what is only kept while nobody needs its room.
    """

    size: int
    capacity: int | None
    used: int = 0
    reserved: int = 0
    peak: int = 0
    squeeze: Callable[[], None] | None = None

    def of(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens take."""
        return -(-tokens // self.size)

    @property
    def free(self) -> int:
        """Return how many blocks are left."""
        return (1 << 62) if self.capacity is None else self.capacity - self.used - self.reserved

    def take(self, blocks: int) -> None:
        """Occupy `blocks` blocks.

        Raises:
            AssertionError: there are not that many; the caller should have looked.
        """
        if blocks > self.free:
            raise AssertionError(f"{blocks} KV blocks taken, {self.free} free")
        self.used += blocks
        self.peak = max(self.peak, self.used)
        if self.squeeze is not None:
            self.squeeze()

    def give(self, blocks: int) -> None:
        """Return `blocks` blocks.

        Raises:
            AssertionError: more than are in use.
        """
        if blocks > self.used:
            raise AssertionError(f"{blocks} KV blocks returned, {self.used} in use")
        self.used -= blocks

    def steps_until_full(self, contexts: IntArray, most: int) -> int:
        """Return how many steps (at most `most`) requests of `contexts` tokens can all take."""
        if self.capacity is None or self.free >= len(contexts) * (most // self.size + 1):
            return most
        held = int((-(-(contexts - 1) // self.size)).sum())
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            needed = int((-(-(contexts - 1 + middle) // self.size)).sum()) - held
            low, high = (middle, high) if needed <= self.free else (low, middle - 1)
        return low


@dataclass
class AdapterCache:
    """Adapters in HBM, fetched before their first request runs and kept until their room is needed.

    Idle adapters leave in order of last use; one in use never does. Room is taken from the KV blocks.
    """

    sizes: np.ndarray
    blocks: Blocks
    block_bytes: float
    users: dict[int, int] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    held_bytes: float = 0.0
    fetched_bytes: float = 0.0
    evictions: int = 0

    def _reserve(self) -> None:
        self.blocks.reserved = -int(-self.held_bytes // self.block_bytes)
        if self.blocks.squeeze is not None:
            self.blocks.squeeze()

    def holds(self, adapter: int) -> bool:
        """Return whether `adapter` is in HBM, or on its way."""
        return adapter in self.users or adapter in self.idle

    def can_hold(self, adapter: int, blocks: int) -> bool:
        """Return whether `adapter` and `blocks` KV blocks fit once idle adapters have left."""
        if self.blocks.capacity is None:
            return True
        idle = sum(self.sizes[a] for a in self.idle if a != adapter)
        fresh = 0.0 if self.holds(adapter) else float(self.sizes[adapter])
        reserved = -int(-(self.held_bytes - idle + fresh) // self.block_bytes)
        return reserved + self.blocks.used + blocks <= self.blocks.capacity

    def acquire(self, adapter: int, blocks: int) -> float:
        """Hold `adapter` for one more request with room for `blocks` KV blocks; return the bytes to fetch."""
        if adapter in self.users:
            self.users[adapter] += 1
            fetched = 0.0
        elif adapter in self.idle:
            del self.idle[adapter]
            self.users[adapter] = 1
            fetched = 0.0
        else:
            fetched = float(self.sizes[adapter])
            self.users[adapter] = 1
            self.held_bytes += fetched
            self.fetched_bytes += fetched
        self._reserve()
        while self.blocks.free < blocks and self.idle:
            self.evict()
        return fetched

    def evict(self) -> None:
        """Drop the idle adapter that was used longest ago."""
        adapter, _ = self.idle.popitem(last=False)
        self.held_bytes -= float(self.sizes[adapter])
        self.evictions += 1
        self._reserve()

    def release(self, adapter: int) -> None:
        """Note that a request of `adapter` has left.

        Raises:
            UserError: it had none.
        """
        if not self.users.get(adapter):
            raise UserError(f"adapter {adapter} released without a request")
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
            self.idle[adapter] = None
