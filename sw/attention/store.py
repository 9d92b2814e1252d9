"""The KV cache of one sequence on several devices, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import DOT_LANES, NdpConfig
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import ceil_div
from plora.sim.functional.layout import Matrix
from plora.sw.attention.layout import KvLayout, token_granule, widest_tile
from plora.sw.attention.merge import Float64, Partial, merge
from plora.sw.attention.plan import AttentionChain, plan_attention
from plora.sw.matrix import slots_of
from plora.sw.memory import Region
from plora.sw.queue_pair import Request, Ticket
from plora.sw.session import Session


@dataclass
class _Head:
    """The tokens of one KV head of one layer on one device."""

    tokens: int = 0
    tiles: list[Region] = field(default_factory=list)


@dataclass(frozen=True)
class DevicePart:
    """What one chain of a device gave: attention of some query rows over some of the device's tokens."""

    device: int
    head: int
    """KV head."""
    chain: AttentionChain
    o: Matrix
    """(rows, head_dim) as the device wrote it."""
    partial: Partial


@dataclass(frozen=True)
class Attended:
    """Attention of all heads of a layer, and what it took."""

    output: Float64
    """(heads, head_dim), the query heads in their order."""
    parts: tuple[DevicePart, ...]
    descriptors: int
    cycles: tuple[int, ...]
    """Of each device: core cycles from first to last beat, summed over its descriptors."""
    numeric: int
    """Numeric flags of all completions together."""


class KvStore:
    """Keys and values of one sequence, its tokens dealt over the devices: token i lies on device i mod N.

    Parameters:
        devices: sessions whose devices hold the cache.
        head_dim: dimension of keys and values.
        kv_heads: KV heads of a layer.
        layers: layers that have a cache.
        tile_tokens: tokens for which memory is taken at a time, on each device and for each head
            (default: as many as one descriptor covers, `plora.sw.attention.layout`).
        name: of the sequence, for messages.

    Raises:
        UserError: no device, or a size that the devices do not take.
    """

    def __init__(
        self,
        devices: Sequence[Session],
        *,
        head_dim: int,
        kv_heads: int = 1,
        layers: int = 1,
        tile_tokens: int | None = None,
        name: str = "sequence",
    ) -> None:
        if not devices or kv_heads < 1 or layers < 1:
            raise UserError(
                f"KV cache of {name}: {layers} layers of {kv_heads} KV heads on {len(devices)} devices: choose at"
                " least one of each"
            )
        self.head_dim, self.kv_heads, self.name = head_dim, kv_heads, name
        self._devices = tuple(devices)
        self._layouts = tuple(_layout(session, head_dim, tile_tokens) for session in devices)
        self._tokens = [0] * layers
        self._heads = [[[_Head() for _ in devices] for _ in range(kv_heads)] for _ in range(layers)]

    def tokens(self, layer: int = 0) -> int:
        """Tokens of ``layer``."""
        return self._tokens[layer]

    def config(self, device: int) -> NdpConfig:
        """Sizes of device ``device``."""
        return self._layouts[device].config

    @property
    def size_bytes(self) -> int:
        """Device memory that the cache takes, all devices together."""
        return sum(tile.size_bytes for layer in self._heads for heads in layer for head in heads for tile in head.tiles)

    def append(self, keys: npt.NDArray[Any], values: npt.NDArray[Any], layer: int = 0) -> None:
        """Add tokens to ``layer``: keys and values are (tokens, kv_heads, head_dim), FP16.

        They are in device memory once the next submission's fence returned. With 16 channels a token is written as
        whole words of 64 bytes.

        Raises:
            UserError: another shape or type, or a device's memory is full (nothing was added then).
        """
        wanted = (self.kv_heads, self.head_dim)
        for what, array in (("keys", keys), ("values", values)):
            if array.dtype != np.float16 or array.ndim != 3 or array.shape[1:] != wanted or len(array) != len(keys):
                raise UserError(
                    f"KV cache of {self.name}: {what} are a {array.dtype} array of shape {array.shape}; give FP16 of"
                    f" shape ({len(keys)}, {self.kv_heads}, {self.head_dim})"
                )
        before, count = self._tokens[layer], len(self._devices)
        self._reserve(layer, before + len(keys))
        for device in range(count):
            mine = slice((device - before) % count, None, count)
            for head in range(self.kv_heads):
                self._store(layer, head, device, keys[mine, head], values[mine, head])
        self._tokens[layer] += len(keys)

    def _reserve(self, layer: int, tokens: int) -> None:
        """Take the tiles that ``tokens`` tokens need, or none."""
        taken: list[tuple[int, _Head]] = []
        try:
            for device, (session, layout) in enumerate(zip(self._devices, self._layouts, strict=True)):
                mine = ceil_div(max(tokens - device, 0), len(self._devices))
                for number, heads in enumerate(self._heads[layer]):
                    head = heads[device]
                    while len(head.tiles) * layout.tile_tokens < mine:
                        what = f"KV cache of {self.name}, layer {layer}, head {number}"
                        head.tiles.append(session.allocator.allocate(layout.tile_bytes, what))
                        taken.append((device, head))
        except UserError:
            for device, head in taken:
                self._devices[device].allocator.free(head.tiles.pop())
            raise

    def _store(self, layer: int, number: int, device: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        layout, head, driver = self._layouts[device], self._heads[layer][number][device], self._devices[device].driver
        done = 0
        while done < len(keys):
            tile, start = divmod(head.tokens, layout.tile_tokens)
            count = min(len(keys) - done, layout.tile_tokens - start)
            for offset, data in layout.writes(start, keys[done : done + count], values[done : done + count]):
                driver.load(head.tiles[tile].address + offset, data)
            head.tokens += count
            done += count

    def free(self) -> None:
        """Give all memory back; the cache is empty then."""
        for layer in self._heads:
            for heads in layer:
                for session, head in zip(self._devices, heads, strict=True):
                    for tile in head.tiles:
                        session.allocator.free(tile)
                    head.tokens, head.tiles = 0, []
        self._tokens = [0] * len(self._tokens)

    def attend(
        self, q: npt.NDArray[Any], scale: int, layer: int = 0, *, others: Sequence[Sequence[Partial]] = ()
    ) -> Attended:
        """Attention of one token's query heads over every token of ``layer``.

        Parameters:
            q: (heads, head_dim), FP16; query heads ``h * G ... (h + 1) * G - 1`` use KV head h.
            scale: softmax scale, FP32 bits (`plora.sw.attention.merge.ordinary_scale`).
            others: partial results over tokens elsewhere (on the GPU), a sequence for each KV head.

        Raises:
            UserError: another shape or type of q.
            DeviceError: a device failed.
        """
        if q.dtype != np.float16 or q.ndim != 2 or q.shape[1] != self.head_dim or not len(q) or len(q) % self.kv_heads:
            raise UserError(
                f"queries are a {q.dtype} array of shape {q.shape}; give FP16 of shape (n * {self.kv_heads},"
                f" {self.head_dim})"
            )
        group = len(q) // self.kv_heads
        queries = [np.ascontiguousarray(q[head * group : (head + 1) * group]) for head in range(self.kv_heads)]
        # Every device has its work before the first is waited for.
        submitted = [self._submit(device, layer, queries, scale) for device in range(len(self._devices))]
        parts = [part for device, chains in enumerate(submitted) for part in self._collect(device, chains)]
        tickets = [[ticket for _, _, chain in chains for ticket in chain] for chains in submitted]
        completions = [[ticket.completion for ticket in each if ticket.completion is not None] for each in tickets]
        outputs = []
        for head in range(self.kv_heads):
            mine = [p.partial.placed(p.chain.rows, group) for p in parts if p.head == head]
            outside = list(others[head]) if others else []
            outputs.append(merge([*mine, *outside, Partial.none(group, self.head_dim)]))
        return Attended(
            output=np.concatenate(outputs),
            parts=tuple(parts),
            descriptors=sum(map(len, completions)),
            cycles=tuple(sum(completion.cycles for completion in each) for each in completions),
            numeric=reduce(or_, (completion.numeric for each in completions for completion in each), 0),
        )

    def _submit(
        self, device: int, layer: int, queries: Sequence[Matrix], scale: int
    ) -> list[tuple[int, AttentionChain, list[Ticket]]]:
        session, layout = self._devices[device], self._layouts[device]
        chains = []
        for number, q in enumerate(queries):
            head = self._heads[layer][number][device]
            tiles = [tile.address for tile in head.tiles]
            for chain in plan_attention(layout, tiles, head.tokens, len(q), slots_of(session.queue)):
                rows = q[chain.rows.start : chain.rows.stop]
                requests = [
                    Request(step.descriptor, rows if step.takes_queries else None, scale) for step in chain.steps
                ]
                chains.append((number, chain, requests))
        if not chains:
            return []
        tickets = iter(session.queue.submit([request for _, _, requests in chains for request in requests]))
        return [(number, chain, [next(tickets) for _ in requests]) for number, chain, requests in chains]

    def _collect(self, device: int, chains: Sequence[tuple[int, AttentionChain, list[Ticket]]]) -> list[DevicePart]:
        queue = self._devices[device].queue
        parts = []
        for head, chain, tickets in chains:
            o = np.empty((len(chain.rows), self.head_dim), np.float16)
            for step, ticket in zip(chain.steps, tickets, strict=True):
                queue.wait_for(ticket)
                if step.dims is not None:
                    assert ticket.result is not None, "a completed descriptor without keep and acc_out has a result"
                    o[:, step.dims.start : step.dims.stop] = ticket.result
            anchors = tickets[-1].anchors
            assert anchors is not None, "the last descriptor of a chain is a transposed one"
            parts.append(DevicePart(device, head, chain, o, Partial.from_device(o, anchors)))
        return parts


def _layout(session: Session, head_dim: int, tile_tokens: int | None) -> KvLayout:
    config = session.driver.config
    granule = token_granule(config, head_dim) if head_dim > 0 else 1
    smallest = KvLayout(config, head_dim, granule)  # says what is wrong with head_dim
    if tile_tokens is None:
        # One descriptor for the keys, one for the values, and no more than a chain can keep terms of.
        key_stripes = ceil_div(smallest.keys.beats * DOT_LANES, smallest.keys.group_rows)
        widest = widest_tile(config, head_dim) // max(key_stripes, smallest.value_groups)
        most = min(widest, kept_column_limit(config, 1, softmax=True))
        tile_tokens = max(granule, most // granule * granule)
    return KvLayout(config, head_dim, tile_tokens)
