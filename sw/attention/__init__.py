"""Attention on the devices: the KV cache in their memories, chains over it, partial results merged.

`layout` says where a token's key and value lie, `plan` makes chains of descriptors over them, `merge` joins
partial results of devices and GPU, `attend` carries the chains out, `store` holds the cache.
"""

from plora.sw.attention.attend import Attended
from plora.sw.attention.layout import KvLayout, widest_tile
from plora.sw.attention.merge import Partial, attend_exactly, merge
from plora.sw.attention.store import KvStore

__all__ = [
    "Attended",
    "KvLayout",
    "KvStore",
    "Partial",
    "attend_exactly",
    "merge",
    "widest_tile",
]
