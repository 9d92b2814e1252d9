"""Matrices in device memory, and products with them: plans carried out through a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.sim.functional.layout import Matrix, pack_operand
from plora.sw.driver import Driver
from plora.sw.memory import HdmAllocator, Region
from plora.sw.queue_pair import QueuePair, Request, Ticket
from plora.sw.tiling import Chain, MatrixLayout, SlotSizes, Step, can_chain, lay_out, plan_gemm, plan_lora


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix in device memory."""

    layout: MatrixLayout
    region: Region


def store_matrix(driver: Driver, allocator: HdmAllocator, matrix: npt.NDArray[Any], name: str) -> PlacedMatrix:
    """Pack the N x K matrix ``matrix`` (FP16) into device memory.

    Raises:
        UserError: it is no FP16 matrix, has a dimension that the device does not take, or does not fit
            what is left of the memory.
    """
    if matrix.ndim != 2 or matrix.dtype != np.float16:
        raise UserError(f"{name} is a {matrix.dtype} array of shape {matrix.shape}; give an FP16 matrix")
    layout = lay_out(driver.config, *matrix.shape)
    region = allocator.allocate(layout.size_bytes, name)
    for tile in layout.tiles():
        part = matrix[tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop]
        driver.load(region.address + tile.offset_bytes, pack_operand(np.ascontiguousarray(part), driver.config))
    return PlacedMatrix(layout, region)


@dataclass(frozen=True)
class Product:
    """A product and what it took."""

    y: Matrix
    descriptors: int
    cycles: int
    """Core cycles from first to last beat, summed over the descriptors."""
    numeric: int
    """Numeric flags of all completions together."""


def slots_of(queue: QueuePair) -> SlotSizes:
    """The slot sizes of ``queue``, for planning."""
    return SlotSizes(queue.place.submission_slot_log2, queue.place.result_slot_log2)


def _check_input(x: npt.NDArray[Any], columns: int, config: NdpConfig) -> None:
    if x.ndim != 2 or x.dtype != np.float16 or x.shape[1] != columns or not x.shape[0]:
        raise UserError(
            f"x is a {x.dtype} array of shape {x.shape}; give FP16 rows of {columns} values for this matrix on"
            f" {config.name!r}"
        )


def _carry_out(queue: QueuePair, plan: Iterable[Chain], x: Matrix, rows: int) -> Product:
    y = np.empty((x.shape[0], rows), dtype=np.float16)
    under_way: deque[Step] = deque()

    def requests() -> Iterator[list[Request]]:
        for chain in plan:
            under_way.extend(chain)
            yield [Request(step.descriptor, _part(x, step.operand)) for step in chain]

    descriptors = cycles = numeric = 0
    for ticket in queue.run(requests()):
        step = under_way.popleft()
        _keep_result(y, step, ticket)
        assert ticket.completion is not None, "run yields completed tickets"
        descriptors += 1
        cycles += ticket.completion.cycles
        numeric |= ticket.completion.numeric
    return Product(y, descriptors, cycles, numeric)


def _part(x: Matrix, ranges: tuple[range, range] | None) -> Matrix | None:
    if ranges is None:
        return None
    rows, columns = ranges
    return np.ascontiguousarray(x[rows.start : rows.stop, columns.start : columns.stop])


def _keep_result(y: Matrix, step: Step, ticket: Ticket) -> None:
    if step.result is not None:
        rows, columns = step.result
        assert ticket.result is not None, "run checks that a result was written where one was asked for"
        y[rows.start : rows.stop, columns.start : columns.stop] = ticket.result


def multiply(queue: QueuePair, w: PlacedMatrix, x: npt.NDArray[Any]) -> Product:
    """Return y = x W^T, x: B x K, W: N x K, y: B x N, all FP16.

    Raises:
        UserError: x is no FP16 matrix of K columns.
        DeviceError: the device failed.
    """
    _check_input(x, w.layout.columns, queue.driver.config)
    plan = plan_gemm(w.layout, w.region.address, x.shape[0], slots_of(queue))
    return _carry_out(queue, plan, x, w.layout.rows)


def multiply_twice(queue: QueuePair, a: PlacedMatrix, b: PlacedMatrix, x: npt.NDArray[Any]) -> Product:
    """Return y = m B^T with m = x A^T rounded to FP16; x: B x K, A: R x K, B: N x R.

    As chains that keep m on the device; where the device cannot keep it (see
    `plora.sw.tiling.can_chain`), as two products with m passing over the link. The bits are the same.

    Raises:
        UserError: x is no FP16 matrix of K columns, or A and B do not fit each other.
        DeviceError: the device failed.
    """
    _check_input(x, a.layout.columns, queue.driver.config)
    if can_chain(a.layout, b.layout):
        slots = slots_of(queue)
        plan = plan_lora(a.layout, a.region.address, b.layout, b.region.address, x.shape[0], slots)
        return _carry_out(queue, plan, x, b.layout.rows)
    m = multiply(queue, a, x)
    y = multiply(queue, b, m.y)
    return Product(y.y, m.descriptors + y.descriptors, m.cycles + y.cycles, m.numeric | y.numeric)
