"""All 2**32 FP16 products of the compiled RTL against double arithmetic: `python -m tests.bench.all_products`.

`--part I/N` does every N-th block of 256 values of the first factor, starting with the I-th.
"""

from __future__ import annotations

import argparse
import time

from tests.hw.rtl.pe.compiled import Product, build_product

BLOCK = 256


def part(text: str) -> tuple[int, int]:
    """Read ``I/N``, 0 <= I < N <= 256.

    Raises:
        ArgumentTypeError: it is something else.
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count) <= BLOCK):
        raise argparse.ArgumentTypeError(f"{text!r}: give I/N with 0 <= I < N <= {BLOCK}")
    return int(index), int(count)


def main() -> None:
    """Print the number of wrong products, and exit with 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=part, default=(0, 1), help="I/N: which blocks to do (default: all)")
    index, count = parser.parse_args().part
    bench, start, done, wrong = Product(build_product()), time.monotonic(), 0, 0
    for first in range(index * BLOCK, 1 << 16, count * BLOCK):
        bad, example = bench.all(first, first + BLOCK)
        wrong, done = wrong + bad, done + (BLOCK << 16)
        if bad:
            print(f"{bad} wrong products of {first:#06x} and up, one of {example >> 16:#06x} * {example & 0xFFFF:#06x}")
    seconds = time.monotonic() - start
    print(f"{done} products, {wrong} wrong, {seconds:.0f} s ({done / seconds / 1e6:.1f} million a second)")
    bench.close()
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
