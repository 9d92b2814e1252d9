"""The prefix cache: keys and values of prompts' beginnings, kept for later prompts that begin alike.

An adapter changes keys and values, so that equal tokens under different adapters have different ones:
the key of a block is the adapter and the hash of all tokens up to the block's end, never the hash alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plora.sim.serving.memory import Blocks

Key = tuple[int, int]
"""Adapter, and hash of everything up to the end of the block."""


@dataclass
class PrefixCache:
    """Full blocks of `unit` KV blocks that prompts have in common.

    A block in use counts as used, one that nobody uses stays until its room is needed; those used
    longest ago go first.
    """

    blocks: Blocks
    unit: int
    users: dict[Key, int] = field(default_factory=dict)
    idle: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.blocks.squeeze = self._squeeze

    def held(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Return how many of the first `keys` are there, and how many of those nobody uses now."""
        idle = 0
        for number, key in enumerate(keys):
            if key in self.idle:
                idle += 1
            elif key not in self.users:
                return number, idle
        return len(keys), idle

    def use(self, keys: Iterable[Key]) -> None:
        """Count one more user of each of `keys`, which are there."""
        fresh = 0
        for key in keys:
            if key in self.idle:
                del self.idle[key]
                fresh += self.unit
            self.users[key] = self.users.get(key, 0) + 1
        self.blocks.take(fresh)

    def add(self, key: Key) -> bool:
        """Take over a block that a request has computed and uses; False if there is one like it already."""
        if key in self.users or key in self.idle:
            return False
        self.users[key] = 1
        return True

    def leave(self, keys: Iterable[Key]) -> None:
        """Count one user less of each of `keys`; the last one's block becomes idle, the end of a prompt first."""
        for key in reversed(list(keys)):
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key]
                self.idle[key] = None
                self.blocks.give(self.unit)
        self._squeeze()

    def _squeeze(self) -> None:
        while self.idle and len(self.idle) * self.unit > self.blocks.free:
            self.idle.popitem(last=False)
