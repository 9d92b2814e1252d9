"""Decode steps of one layer's attention on devices, held against the golden model and against float64."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import expansion_log2
from plora.hw.defs.queue import SUM_FRACTION_BITS, softmax_scale_value
from plora.sim.golden.bf16 import from_float, to_float
from plora.sim.golden.integers import dequantize, quantize
from plora.sim.golden.softmax import NO_ANCHOR, golden_attention, golden_attention_bf16
from plora.sw.adapters.tensors import read_tensors
from plora.sw.attention.attend import Attended, DevicePart
from plora.sw.attention.bound import error_bound, error_bound_bf16
from plora.sw.attention.merge import Float64, attend_exactly, merge
from plora.sw.attention.store import KvStore
from plora.sw.driver import LinkTraffic
from plora.sw.matrix import Values
from plora.sw.scaling import attention_scaling, largest_magnitude
from plora.sw.session import Session


@dataclass(frozen=True)
class Inputs:
    """Queries of some decode steps, and all keys and values, of one type; BF16 as bit patterns (``numpy.uint16``)."""

    q: Values
    """(steps, heads, head_dim)."""
    k: Values
    """(tokens, kv_heads, head_dim): step s attends to the first ``tokens - steps + 1 + s``."""
    v: Values
    dtype: DType = DType.FP16

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if q.ndim != 3 or k.ndim != 3 or v.shape != k.shape or q.shape[2] != k.shape[2] or not q.size or not k.size:
            raise UserError(
                f"q {q.shape}, k {k.shape} and v {v.shape}: give q as (heads, head_dim) or (steps, heads, head_dim), k"
                " and v as (tokens, kv_heads, head_dim), all with the same head_dim"
            )
        if q.shape[1] % k.shape[1]:
            raise UserError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
        if len(q) > len(k):
            raise UserError(f"{len(q)} steps need at least as many tokens, there are {len(k)}")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return int(self.q.shape[1] // self.k.shape[1])

    def numbers(self, array: Values) -> npt.NDArray[Any]:
        """The values of one of the arrays, or of a part."""
        return to_float(array) if self.dtype == DType.BF16 else array


def synthetic_inputs(
    heads: int, kv_heads: int, head_dim: int, tokens: int, steps: int, seed: int, dtype: DType = DType.FP16
) -> Inputs:
    """Standard normal queries, keys and values; the last step attends to ``tokens + steps - 1`` tokens."""
    random = np.random.default_rng(seed)
    shapes = ((steps, heads, head_dim), *2 * ((tokens + steps - 1, kv_heads, head_dim),))
    q, k, v = (_rounded(random.standard_normal(shape, np.float32), dtype) for shape in shapes)
    return Inputs(q, k, v, dtype)


def read_inputs(path: Path, dtype: DType = DType.FP16) -> Inputs:
    """Read arrays ``q``, ``k`` and ``v`` from an npz or a safetensors file; they are rounded to ``dtype``.

    Raises:
        UserError: the file cannot be read, lacks an array, or holds a value that the type cannot.
    """
    arrays = _read_npz(path) if path.suffix == ".npz" else {n: t.values for n, t in read_tensors(path).items()}
    missing = [name for name in ("q", "k", "v") if name not in arrays]
    if missing:
        raise UserError(
            f"{path}: no array {missing[0]!r}, only {', '.join(sorted(arrays)) or 'none'}; it needs q, k, v"
        )
    q, k, v = (_checked(arrays[name], dtype, f"{path}: {name}") for name in ("q", "k", "v"))
    try:
        return Inputs(q[None] if q.ndim == 2 else q, k, v, dtype)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return dict(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None
    except (ValueError, TypeError, AttributeError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise UserError(f"{path}: no whole npz file of plain arrays ({error}); save it again") from None


def _rounded(values: npt.NDArray[Any], dtype: DType) -> Values:
    """Numbers in the type, BF16 as bit patterns."""
    with np.errstate(over="ignore"):
        return from_float(values) if dtype == DType.BF16 else values.astype(np.float16)


def _checked(array: npt.NDArray[Any], dtype: DType, where: str) -> Values:
    if array.dtype.kind not in "fiu":
        raise UserError(f"{where} has type {array.dtype}; save it as numbers")
    values = _rounded(array, dtype)
    bad = np.count_nonzero(~np.isfinite(to_float(values) if dtype == DType.BF16 else values))
    if bad:
        raise UserError(f"{where} has {bad} values that {dtype.name} cannot hold; scale them, or mend the file")
    return np.ascontiguousarray(values)


@dataclass(frozen=True)
class StepReport:
    """One decode step beside the golden model and float64."""

    tokens: int
    """Attended to, those on the GPU included."""
    attended: Attended
    match: bool
    """Every chain's result has the golden model's bits."""
    max_abs_error: float
    """Largest distance of an output from float64, with keys and values as the cache holds them."""
    bound: float
    """The largest that is proven possible (`plora.sw.attention.bound`)."""
    within_bound: bool
    """Every output is as near as is proven of it."""
    rounding_error: float
    """Largest distance of an output from float64 with keys and values as they were before the cache rounded them."""
    largest: float
    """Largest float64 output, to see errors beside."""
    append_traffic: LinkTraffic
    """To bring the step's new tokens to the devices."""
    attend_traffic: LinkTraffic
    run_s: float


def decode(
    sessions: Sequence[Session],
    inputs: Inputs,
    scale: int,
    *,
    gpu_tokens: int = 0,
    tile_tokens: int | None = None,
    kv_dtype: DType | None = None,
) -> Iterator[StepReport]:
    """Run the steps one after the other: append what is new, attend, compare.

    Parameters:
        sessions: the devices.
        scale: softmax scale, FP32 bits.
        gpu_tokens: the first tokens stay on the GPU, which is computed in float64 here.
        tile_tokens: see `KvStore`.
        kv_dtype: of the keys and values on the devices: INT8 or INT4 beside FP16 inputs, else that of the inputs.

    Raises:
        UserError: more tokens on the GPU than the first step has, or devices without enough memory.
        DeviceError: a device failed.
    """
    first = len(inputs.k) - len(inputs.q) + 1
    if not 0 <= gpu_tokens <= first:
        raise UserError(f"{gpu_tokens} tokens on the GPU: the first step has {first}")
    kv_heads, head_dim = inputs.k.shape[1:]
    dtype = inputs.dtype if kv_dtype is None else kv_dtype
    store = KvStore(sessions, head_dim=head_dim, kv_heads=kv_heads, tile_tokens=tile_tokens, dtype=dtype)
    held_k, held_v = (_as_held(each, gpu_tokens, dtype) for each in (inputs.k, inputs.v))
    start = gpu_tokens
    for step, q in enumerate(inputs.q):
        tokens = first + step
        k, v = held_k[:tokens], held_v[:tokens]
        others = [
            [attend_exactly(*_numbers(inputs, q, k[:gpu_tokens], v[:gpu_tokens], head), scale)]
            for head in range(kv_heads)
        ]
        before = _traffic(sessions)
        began = time.perf_counter()
        store.append(inputs.k[start:tokens], inputs.v[start:tokens])
        appended = _traffic(sessions)
        attended = store.attend(q, scale, others=others)
        run_s = time.perf_counter() - began
        start = tokens
        match = all(
            _is_golden(part, inputs, q, k[gpu_tokens:], v[gpu_tokens:], scale, store, len(sessions))
            for part in attended.parts
        )
        exact, bound = _reference(inputs, q, k, v, scale, store)
        error = np.abs(attended.output - exact)
        given = exact
        if expansion_log2(dtype):
            given, _ = _reference(inputs, q, inputs.k[:tokens], inputs.v[:tokens], scale, store)
        yield StepReport(
            tokens=tokens,
            attended=attended,
            match=match,
            max_abs_error=float(error.max()),
            bound=float(bound.max()),
            within_bound=bool((error <= bound).all()),
            rounding_error=float(np.abs(attended.output - given).max()),
            largest=float(np.abs(exact).max()),
            append_traffic=appended.since(before),
            attend_traffic=_traffic(sessions).since(appended),
            run_s=run_s,
        )


def _as_held(rows: Values, gpu_tokens: int, dtype: DType) -> Values:
    """Keys or values (tokens, kv_heads, head_dim) as the devices hold them, those on the GPU as they are."""
    if not expansion_log2(dtype):
        return rows
    mine = rows[gpu_tokens:]
    held = dequantize(quantize(mine.reshape(-1, rows.shape[2]), dtype)).reshape(mine.shape)
    return np.concatenate([rows[:gpu_tokens], held])


def _heads(inputs: Inputs, head: int) -> slice:
    return slice(head * inputs.group, (head + 1) * inputs.group)


def _traffic(sessions: Sequence[Session]) -> LinkTraffic:
    total = LinkTraffic()
    for session in sessions:
        total = total.plus(session.driver.traffic)
    return total


def _is_golden(
    part: DevicePart, inputs: Inputs, q: Values, k: Values, v: Values, scale: int, store: KvStore, devices: int
) -> bool:
    """True if a chain's result and anchors are those of the golden model; ``k`` and ``v`` are the devices' tokens."""
    rows, tokens = part.chain.rows, part.chain.tokens
    mine = q[_heads(inputs, part.head)][rows.start : rows.stop]
    keys, values = (each[part.device :: devices, part.head][tokens.start : tokens.stop] for each in (k, v))
    config = store.config(part.device)
    if inputs.dtype == DType.BF16:
        how = store.scaling(q, scale)
        factor = softmax_scale_value(how.scale)
        golden = golden_attention_bf16(mine, keys, values, factor, how.scores, how.values, config).partial
    else:
        golden = golden_attention(mine, keys, values, softmax_scale_value(scale), config).partial
    m = np.where(golden.anchor == NO_ANCHOR, -np.inf, golden.anchor + golden.shift)
    sums = golden.total * np.exp2(-float(SUM_FRACTION_BITS) - golden.shift)
    return (
        part.o.tobytes() == golden.o.tobytes()
        and np.array_equal(part.partial.m, m)
        and np.array_equal(part.partial.l, sums)
    )


def _reference(inputs: Inputs, q: Values, k: Values, v: Values, scale: int, store: KvStore) -> tuple[Float64, Float64]:
    exact, bound = [], []
    accumulator = store.config(0).accumulator
    for head in range(store.kv_heads):
        numbers = _numbers(inputs, q, k, v, head)
        exact.append(merge([attend_exactly(*numbers, scale)]))
        if inputs.dtype == DType.BF16:
            # As for a device with all tokens: one that lacks the largest scales the others by more, and errs less.
            how = attention_scaling(q, largest_magnitude(k), largest_magnitude(v), scale)
            mine = q[_heads(inputs, head)], k[:, head], v[:, head]
            bound.append(error_bound_bf16(*mine, how, accumulator))
        else:
            bound.append(error_bound(*numbers, scale, accumulator))
    return np.concatenate(exact), np.concatenate(bound)


def _numbers(
    inputs: Inputs, q: Values, k: Values, v: Values, head: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """What one KV head multiplies."""
    return inputs.numbers(q[_heads(inputs, head)]), inputs.numbers(k[:, head]), inputs.numbers(v[:, head])
