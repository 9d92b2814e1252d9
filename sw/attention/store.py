"""The KV cache of one sequence on several devices: who holds which tile, and what lies in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import ceil_div
from plora.hw.defs.queue import NO_EXPONENTS
from plora.sw.attention.attend import Attended, Attending, HeadPlace, Queries, begin
from plora.sw.attention.layout import KvLayout, array_type, host_dtype, token_granule
from plora.sw.attention.merge import Partial
from plora.sw.memory import Region
from plora.sw.scaling import AttentionScaling, attention_scaling, largest_magnitude
from plora.sw.session import Session


@dataclass(eq=False)
class _Tile:
    """A tile in device memory, and how many sequences have it."""

    region: Region
    users: int = 1


@dataclass
class _Head:
    """The tokens of one KV head of one layer on one device."""

    tokens: int = 0
    tiles: list[_Tile] = field(default_factory=list)


class KvStore:
    """Keys and values of one sequence, its tokens dealt over the devices: token i lies on device i mod N.

    Memory is written only where new tokens lie, and never while another sequence has it (`fork`). `append`,
    `truncate` and `free` are for caches of which no attention is under way.

    Parameters:
        devices: sessions whose devices hold the cache.
        head_dim: dimension of keys and values.
        kv_heads: KV heads of a layer.
        layers: layers that have a cache.
        tile_tokens: tokens for which memory is taken at a time, on each device and for each head
            (default: as many as one descriptor covers, `plora.sw.attention.layout`).
        name: of the sequence, for messages.
        dtype: of keys and values in the devices; BF16 as bit patterns (``numpy.uint16``), queries too. What INT8 and
            INT4 hold comes as FP16 and is rounded token by token (`plora.sim.golden.integers.quantize`).

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
        dtype: DType = DType.FP16,
    ) -> None:
        if not devices or kv_heads < 1 or layers < 1:
            raise UserError(
                f"KV cache of {name}: {layers} layers of {kv_heads} KV heads on {len(devices)} devices: choose at"
                " least one of each"
            )
        self.head_dim, self.kv_heads, self.layers, self.name, self.dtype = head_dim, kv_heads, layers, name, dtype
        self._largest = [(0.0, 0.0)] * layers
        """Largest magnitudes of the BF16 keys and values that a layer ever had."""
        self._tile_tokens = tile_tokens
        self._devices = tuple(devices)
        self._layouts = tuple(_layout(session, head_dim, tile_tokens, dtype) for session in devices)
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
        """Device memory that the cache has, all devices together; what it shares counts in full."""
        return sum(tile.region.size_bytes for _, _, head in self._all_heads() for tile in head.tiles)

    def _all_heads(self) -> Iterator[tuple[int, int, _Head]]:
        """Layer, device and head, of all of them."""
        for layer, of_layer in enumerate(self._heads):
            for of_head in of_layer:
                for device, head in enumerate(of_head):
                    yield layer, device, head

    # --- growing and shrinking --------------------------------------------------------------------------

    def append(self, keys: npt.NDArray[Any], values: npt.NDArray[Any], layer: int = 0) -> None:
        """Add tokens to ``layer``: keys and values are (tokens, kv_heads, head_dim).

        They are in device memory once the next submission's fence returned. With 16 channels a token is written as
        whole words of 64 bytes.

        Raises:
            UserError: another shape or type, or a device's memory is full (nothing was added then).
        """
        wanted = (self.kv_heads, self.head_dim)
        for what, array in (("keys", keys), ("values", values)):
            right_type = array.dtype == array_type(self.dtype)
            if not right_type or array.ndim != 3 or array.shape[1:] != wanted or len(array) != len(keys):
                raise UserError(
                    f"KV cache of {self.name}: {what} are a {array.dtype} array of shape {array.shape}; give"
                    f" {host_dtype(self.dtype).name} of shape ({len(keys)}, {self.kv_heads}, {self.head_dim})"
                )
        if not len(keys):
            return
        before, count = self._tokens[layer], len(self._devices)
        self._reserve(layer, before + len(keys))
        for device in range(count):
            mine = slice((device - before) % count, None, count)
            for head in range(self.kv_heads):
                self._store(layer, head, device, keys[mine, head], values[mine, head])
        self._tokens[layer] += len(keys)
        if self.dtype == DType.BF16:
            key, value = self._largest[layer]
            self._largest[layer] = max(key, largest_magnitude(keys)), max(value, largest_magnitude(values))

    def _share(self, tokens: int, device: int) -> int:
        """How many of the first ``tokens`` tokens lie on ``device``."""
        return ceil_div(max(tokens - device, 0), len(self._devices))

    def _reserve(self, layer: int, tokens: int) -> None:
        """Take the tiles that ``tokens`` tokens need, or none; copy the tile that grows if others have it too."""
        taken: list[tuple[int, _Head, _Tile | None, _Tile]] = []
        try:
            for number, heads in enumerate(self._heads[layer]):
                for device, head in enumerate(heads):
                    size, mine = self._layouts[device].tile_tokens, self._share(tokens, device)
                    what = f"KV cache of {self.name}, layer {layer}, head {number}"
                    grows = head.tiles[-1] if head.tokens % size and mine > head.tokens else None
                    if grows is not None and grows.users > 1:
                        taken.append((device, head, grows, self._allocate(device, what)))
                    for _ in range(len(head.tiles), ceil_div(mine, size)):
                        taken.append((device, head, None, self._allocate(device, what)))
        except UserError:
            for device, _, _, tile in taken:
                self._devices[device].allocator.free(tile.region)
            raise
        for device, head, shared, tile in taken:
            if shared is None:
                head.tiles.append(tile)
            else:
                self._copy(device, shared.region, tile.region, head.tokens % self._layouts[device].tile_tokens)
                shared.users -= 1
                head.tiles[head.tiles.index(shared)] = tile

    def _allocate(self, device: int, what: str) -> _Tile:
        return _Tile(self._devices[device].allocator.allocate(self._layouts[device].tile_bytes, what))

    def _copy(self, device: int, source: Region, target: Region, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a tile."""
        driver = self._devices[device].driver
        driver.port.hdm_fence()
        for offset, size in self._layouts[device].extents(tokens):
            driver.load(target.address + offset, driver.fetch(source.address + offset, size))

    def _store(self, layer: int, number: int, device: int, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        layout, head, driver = self._layouts[device], self._heads[layer][number][device], self._devices[device].driver
        done = 0
        while done < len(keys):
            tile, start = divmod(head.tokens, layout.tile_tokens)
            count = min(len(keys) - done, layout.tile_tokens - start)
            for offset, data in layout.writes(start, keys[done : done + count], values[done : done + count]):
                driver.load(head.tiles[tile].region.address + offset, data)
            head.tokens += count
            done += count

    def truncate(self, tokens: int) -> None:
        """Forget every token from number ``tokens`` on, in all layers, and give back the tiles that fall empty.

        Raises:
            UserError: a negative number.
        """
        if tokens < 0:
            raise UserError(f"KV cache of {self.name}: {tokens} tokens cannot be kept; choose 0 or more")
        for _, device, head in self._all_heads():
            head.tokens = min(head.tokens, self._share(tokens, device))
            while len(head.tiles) > ceil_div(head.tokens, self._layouts[device].tile_tokens):
                tile = head.tiles.pop()
                tile.users -= 1
                if not tile.users:
                    self._devices[device].allocator.free(tile.region)
        self._tokens = [min(have, tokens) for have in self._tokens]

    def free(self) -> None:
        """Give all memory back; the cache is empty then."""
        self.truncate(0)

    def fork(self, name: str) -> KvStore:
        """A sequence with the same tokens so far, in the same memory: a common prefix is stored once.

        A tile that is not full yet is copied by the first of them that grows.
        """
        other = KvStore(
            self._devices,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads,
            layers=self.layers,
            tile_tokens=self._tile_tokens,
            name=name,
            dtype=self.dtype,
        )
        other._tokens, other._largest = list(self._tokens), list(self._largest)
        for (_, _, mine), (_, _, theirs) in zip(self._all_heads(), other._all_heads(), strict=True):
            theirs.tokens, theirs.tiles = mine.tokens, list(mine.tiles)
            for tile in mine.tiles:
                tile.users += 1
        return other

    # --- attention --------------------------------------------------------------------------------------

    def begin(self, q: npt.NDArray[Any], scale: int, layer: int = 0) -> Attending:
        """Submit attention of one token's query heads over every token of ``layer``; `Attending.finish` waits for it.

        So the devices can be given work of several sequences before the first is waited for.

        Parameters:
            q: (heads, head_dim); query heads ``h * G ... (h + 1) * G - 1`` use KV head h.
            scale: softmax scale, FP32 bits (`plora.hw.defs.queue.ordinary_softmax_scale`).

        Raises:
            UserError: another shape or type of q.
            DeviceError: a device failed.
        """
        right_type = q.dtype == array_type(self.dtype)
        if not right_type or q.ndim != 2 or q.shape[1] != self.head_dim or not len(q) or len(q) % self.kv_heads:
            raise UserError(
                f"queries are a {q.dtype} array of shape {q.shape}; give {host_dtype(self.dtype).name} of shape"
                f" (n * {self.kv_heads}, {self.head_dim})"
            )
        places = [
            [
                HeadPlace(
                    session, layout, tuple(tile.region.address for tile in heads[device].tiles), heads[device].tokens
                )
                for heads in self._heads[layer]
            ]
            for device, (session, layout) in enumerate(zip(self._devices, self._layouts, strict=True))
        ]
        return begin(places, Queries(q, self.dtype, self.scaling(q, scale, layer)))

    def scaling(self, q: npt.NDArray[Any], scale: int, layer: int = 0) -> AttentionScaling:
        """How queries ``q`` and the cache are scaled on the devices: not at all unless they are BF16."""
        if self.dtype == DType.BF16:
            return attention_scaling(q, *self._largest[layer], scale)
        return AttentionScaling(NO_EXPONENTS, NO_EXPONENTS, scale)

    def attend(
        self, q: npt.NDArray[Any], scale: int, layer: int = 0, *, others: Sequence[Sequence[Partial]] = ()
    ) -> Attended:
        """`begin` and `Attending.finish` in one."""
        return self.begin(q, scale, layer).finish(others)


def _layout(session: Session, head_dim: int, tile_tokens: int | None, dtype: DType) -> KvLayout:
    config = session.driver.config
    granule = token_granule(config, head_dim, dtype) if head_dim > 0 else 1
    smallest = KvLayout(config, head_dim, granule, dtype)  # says what is wrong with head_dim
    if tile_tokens is None:
        # One descriptor for the keys, one for the values, and no more than a chain can keep terms of.
        of_values = MAX_OPERAND_BYTES // (smallest.value_groups * smallest.value_stride * config.stripe_bytes) * granule
        most = min(smallest.most_keys, of_values, kept_column_limit(config, 1, softmax=True))
        tile_tokens = max(granule, most // granule * granule)
    return KvLayout(config, head_dim, tile_tokens, dtype)
