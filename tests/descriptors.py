"""Descriptors over an operand that a test has put into memory."""

from __future__ import annotations

from dataclasses import replace

from plora.hw.defs.config import VALUE_BYTES
from plora.hw.defs.descriptor import Descriptor, Keep, Op, Source


def product(address: int, size_bytes: int, n: int, k: int, b: int, **fields: int) -> Descriptor:
    """The product of ``b`` GPU rows with an ``n`` x ``k`` operand of that size at ``address``; ``fields`` override."""
    d = Descriptor(
        op=Op.GEMV if b == 1 else Op.GEMM,
        device_address=address,
        device_bytes=size_bytes,
        device_rows=n,
        device_columns=k,
        gpu_bytes=VALUE_BYTES * b * k,
        gpu_rows=b,
        gpu_columns=k,
    )
    return replace(d, **fields)


def scores(address: int, size_bytes: int, tokens: int, dims: int, b: int, **fields: int) -> Descriptor:
    """Softmax terms of ``b`` queries over keys, the first of a chain."""
    return product(address, size_bytes, tokens, dims, b, op=Op.SOFTMAX, chain=1, **{"keep": Keep.NEW, **fields})


def weigh(address: int, size_bytes: int, tokens: int, dims: int, b: int, **fields: int) -> Descriptor:
    """Values, weighed with the softmax terms of ``b`` queries that the chain has kept."""
    return product(address, size_bytes, dims, tokens, b, transpose=1, **{"source": Source.KEPT, **fields})
