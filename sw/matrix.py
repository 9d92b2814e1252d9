"""Matrices in device memory, and products with them: plans carried out through a queue.

FP16 matrices are ``numpy.float16``. BF16 ones are bit patterns, ``numpy.uint16``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import Descriptor, DType, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import NO_EXPONENTS, Exponents
from plora.sim.functional.layout import pack_operand
from plora.sw.driver import Driver
from plora.sw.memory import HdmAllocator, Region
from plora.sw.queue_pair import QueuePair, Request, Ticket
from plora.sw.scaling import device_exponent, kept_exponent, largest_row_sum, operand_exponent
from plora.sw.tiling import Chain, MatrixLayout, SlotSizes, Step, can_chain, lay_out, plan_gemm, plan_lora

ARRAY_TYPES = {DType.FP16: np.dtype(np.float16), DType.BF16: np.dtype(np.uint16)}
"""What the host's arrays of a device type are."""

Values = npt.NDArray[Any]
"""A matrix of one of `ARRAY_TYPES`."""


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix in device memory."""

    layout: MatrixLayout
    region: Region
    dtype: DType = DType.FP16
    exponent: int = 0
    """Of the power of two by which BF16 values are multiplied."""
    row_sum: float = 0.0
    """`plora.sw.scaling.largest_row_sum` of BF16 values."""


def store_matrix(
    driver: Driver, allocator: HdmAllocator, matrix: Values, name: str, dtype: DType = DType.FP16
) -> PlacedMatrix:
    """Pack the N x K matrix ``matrix`` into device memory.

    Raises:
        UserError: it is no matrix of ``dtype``, has a dimension that the device does not take, or does not fit
            what is left of the memory.
    """
    _check_matrix(matrix, dtype, name)
    layout = lay_out(driver.config, *matrix.shape)
    region = allocator.allocate(layout.size_bytes, name)
    for tile in layout.tiles():
        part = matrix[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop]
        driver.load(region.address + tile.offset_bytes, pack_operand(np.ascontiguousarray(part), driver.config))
    if dtype == DType.BF16:
        return PlacedMatrix(layout, region, dtype, device_exponent(matrix), largest_row_sum(matrix))
    return PlacedMatrix(layout, region)


def _check_matrix(matrix: Values, dtype: DType, name: str) -> None:
    if matrix.ndim != 2 or matrix.dtype != ARRAY_TYPES[dtype]:
        raise UserError(
            f"{name} is a {matrix.dtype} array of shape {matrix.shape}; give a matrix of {dtype.name}"
            f" values ({ARRAY_TYPES[dtype]})"
        )


@dataclass(frozen=True)
class Product:
    """A product and what it took."""

    y: Values
    descriptors: int
    cycles: int
    """Core cycles from first to last beat, summed over the descriptors."""
    numeric: int
    """Numeric flags of all completions together."""


def slots_of(queue: QueuePair) -> SlotSizes:
    """The slot sizes of ``queue``, for planning."""
    return SlotSizes(queue.place.submission_slot_log2, queue.place.result_slot_log2)


def _check_input(x: Values, w: PlacedMatrix, config: NdpConfig) -> None:
    columns = w.layout.columns
    if x.ndim != 2 or x.dtype != ARRAY_TYPES[w.dtype] or x.shape[1] != columns or not x.shape[0]:
        raise UserError(
            f"x is a {x.dtype} array of shape {x.shape}; give {w.dtype.name} rows of {columns} values"
            f" ({ARRAY_TYPES[w.dtype]}) for this matrix on {config.name!r}"
        )


def _carry_out(
    queue: QueuePair,
    plan: Iterable[Chain],
    x: Values,
    rows: int,
    dtype: DType = DType.FP16,
    exponents: Callable[[Descriptor], Exponents] = lambda d: NO_EXPONENTS,
) -> Product:
    y = np.empty((x.shape[0], rows), dtype=ARRAY_TYPES[dtype])
    under_way: deque[Step] = deque()

    def requests() -> Iterator[list[Request]]:
        for chain in plan:
            under_way.extend(chain)
            yield [
                Request(
                    replace(step.descriptor, dtype=dtype),
                    _part(x, step.operand),
                    exponents=exponents(step.descriptor),
                )
                for step in chain
            ]

    descriptors = cycles = numeric = 0
    for ticket in queue.run(requests()):
        step = under_way.popleft()
        _keep_result(y, step, ticket)
        assert ticket.completion is not None, "run yields completed tickets"
        descriptors += 1
        cycles += ticket.completion.cycles
        numeric |= ticket.completion.numeric
    return Product(y, descriptors, cycles, numeric)


def _part(x: Values, ranges: tuple[range, range] | None) -> Values | None:
    if ranges is None:
        return None
    rows, columns = ranges
    return np.ascontiguousarray(x[rows.start : rows.stop, columns.start : columns.stop])


def _keep_result(y: Values, step: Step, ticket: Ticket) -> None:
    if step.result is not None:
        rows, columns = step.result
        assert ticket.result is not None, "run checks that a result was written where one was asked for"
        y[rows.start : rows.stop, columns.start : columns.stop] = ticket.result.view(y.dtype)


def product_exponents(x: Values, w: PlacedMatrix) -> Exponents:
    """Return the exponents of y = x W^T, all 0 for FP16."""
    return Exponents(operand_exponent(x), w.exponent) if w.dtype == DType.BF16 else NO_EXPONENTS


def chain_exponents(x: Values, a: PlacedMatrix, b: PlacedMatrix) -> tuple[Exponents, Exponents]:
    """Return the exponents of m = x A^T, which stays on the device, and of y = m B^T; all 0 for FP16."""
    if a.dtype != DType.BF16:
        return NO_EXPONENTS, NO_EXPONENTS
    kept = kept_exponent(x, a.row_sum)
    return Exponents(operand_exponent(x), a.exponent, kept), Exponents(kept, b.exponent)


def multiply(queue: QueuePair, w: PlacedMatrix, x: Values) -> Product:
    """Return y = x W^T, x: B x K, W: N x K, y: B x N, all of W's type.

    Raises:
        UserError: x is no matrix of that type and of K columns.
        DeviceError: the device failed.
    """
    _check_input(x, w, queue.driver.config)
    return _multiply(queue, w, x, product_exponents(x, w))


def _multiply(queue: QueuePair, w: PlacedMatrix, x: Values, exponents: Exponents) -> Product:
    plan = plan_gemm(w.layout, w.region.address, x.shape[0], slots_of(queue))
    return _carry_out(queue, plan, x, w.layout.rows, w.dtype, lambda d: exponents)


def multiply_twice(queue: QueuePair, a: PlacedMatrix, b: PlacedMatrix, x: Values) -> Product:
    """Return y = m B^T with m = x A^T rounded to A's type; x: B x K, A: R x K, B: N x R.

    As chains that keep m on the device; where the device cannot keep it (see
    `plora.sw.tiling.can_chain`), as two products with m passing over the link. The bits are the same.

    Raises:
        UserError: x is no matrix of A's type and of K columns, or A and B do not fit each other.
        DeviceError: the device failed.
    """
    _check_input(x, a, queue.driver.config)
    if a.dtype != b.dtype:
        raise UserError(f"A is {a.dtype.name} and B {b.dtype.name}: store both in the same type")
    first, second = chain_exponents(x, a, b)
    if can_chain(a.layout, b.layout):
        slots = slots_of(queue)
        plan = plan_lora(a.layout, a.region.address, b.layout, b.region.address, x.shape[0], slots)
        return _carry_out(
            queue, plan, x, b.layout.rows, a.dtype, lambda d: second if d.source == Source.KEPT else first
        )
    m = _multiply(queue, a, x, first)
    _check_input(m.y, b, queue.driver.config)
    y = _multiply(queue, b, m.y, second)
    return Product(y.y, m.descriptors + y.descriptors, m.cycles + y.cycles, m.numeric | y.numeric)
