"""Sizes of the NDP device: one frozen object that the RTL, the models and the host all read.

Terms. A *word* is one beat of one memory channel: 64 bytes, 32 FP16 values. A *stripe* is the
same word index of all channels together: ``channels * 64`` bytes, what the memory delivers in one
cycle. Memory is interleaved over the channels word by word, so a stripe is also a run of
consecutive device physical addresses (DPA) that starts at a multiple of its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

from plora.hw.defs.errors import UserError

WORD_BYTES = 64
"""Bytes of one channel beat: a 512-bit AXI data bus, and the granule of channel interleaving."""

VALUE_BYTES = 2
"""Bytes of an FP16 or BF16 value."""

WORD_VALUES = WORD_BYTES // VALUE_BYTES
"""FP16 values in a word."""

DOT_LANES = 16
"""Multiply-add lanes of one dot unit (area and speed of this width: docs/decisions.md)."""

DOTS_PER_WORD = WORD_VALUES // DOT_LANES
"""Dot units that share one channel word, per row of the PE array."""

PE_ROWS = 2
"""Rows of the PE array: input rows that one pass over a weight word serves."""

KEPT_MAX_VALUES = 256
"""Most columns of an intermediate that stays on the device between two descriptors of a chain."""

KEPT_ROW_WORDS = KEPT_MAX_VALUES // WORD_VALUES
"""Words that a pair of rows of such an intermediate may take."""

KEPT_MAX_TOKENS = 1 << 15
"""Most columns of an intermediate that passed the softmax unit: tokens of one chain."""

SOFTMAX_MAX_ROWS = 32
"""Query rows of which the softmax unit keeps the state, in each bank."""

SOFTMAX_BANKS = 2
"""Intermediates of softmax terms that a chain can keep: that of the newest SOFTMAX descriptors and the one before.
Each has an equal share of the kept words and of the softmax unit's states."""


@dataclass(frozen=True)
class AccumulatorConfig:
    """The fixed-point grid on which products are summed.

    A product of two FP16 values is placed on a grid of step ``2**lsb_exponent`` (bits below it are
    dropped from its magnitude), and magnitudes of ``2**msb_exponent`` or more count as infinite.
    Sums on the grid are exact, hence independent of order and of tiling. ``terms_log2`` bits of
    growth let ``2**terms_log2`` products be summed without ever wrapping.

    The default window keeps every product that can matter to an FP16 result: FP16 ends at 65504
    (below ``2**18`` with room for cancelling terms) and its last subnormal bit is ``2**-24``, 256
    steps of the grid.
    """

    lsb_exponent: int = -32
    msb_exponent: int = 18
    terms_log2: int = 16

    def __post_init__(self) -> None:
        if not -48 <= self.lsb_exponent <= -24:
            raise UserError(
                f"accumulator lsb_exponent is {self.lsb_exponent}: FP16 products end at 2**-48 and results at 2**-24;"
                " choose -48 ... -24"
            )
        if not 16 <= self.msb_exponent <= 32:
            raise UserError(
                f"accumulator msb_exponent is {self.msb_exponent}: FP16 ends below 2**16 and its products below 2**32;"
                " choose 16 ... 32"
            )
        if not 4 <= self.terms_log2 <= 20:
            raise UserError(f"accumulator terms_log2 is {self.terms_log2}: choose 4 ... 20")

    @property
    def product_bits(self) -> int:
        """Bits of a product's magnitude on the grid."""
        return self.msb_exponent - self.lsb_exponent

    @property
    def bits(self) -> int:
        """Bits of the accumulator, sign included: no sum of ``2**terms_log2`` products wraps."""
        return self.product_bits + self.terms_log2 + 1

    @property
    def max_terms(self) -> int:
        """Most products that may be summed into one result (the limit on K)."""
        return 1 << self.terms_log2


@dataclass(frozen=True)
class NdpConfig:
    """Every size of the device. Use a preset, or `dataclasses.replace` on one.

    Raises:
        UserError: a size is out of range or does not fit the others.
    """

    name: str
    channels: int
    """Memory channels, a power of two, 1 ... 16. Each is one AXI4 port of 512 bits."""
    input_buffer_bytes: int
    """Operand rows from the GPU: per PE row, whole stripes."""
    dram_buffer_bytes: int
    """Weight words on their way from memory; also holds a row group while input rows pass."""
    output_buffer_bytes: int
    """Results, and intermediates of a chain."""
    queues: int
    """Submission/completion queue pairs, each bound to one PASID."""
    instruction_buffer_depth: int
    """Descriptors fetched and checked ahead of execution."""
    dpa_bits: int
    """Bits of a device physical address that exist as memory; higher addresses are refused."""
    clock_mhz: int = 1000
    accumulator: AccumulatorConfig = AccumulatorConfig()

    def __post_init__(self) -> None:
        where = f"device configuration {self.name!r}"
        if self.channels not in (1, 2, 4, 8, 16):
            raise UserError(f"{where}: channels is {self.channels}; choose 1, 2, 4, 8 or 16")
        for field in ("input_buffer_bytes", "dram_buffer_bytes", "output_buffer_bytes"):
            size = getattr(self, field)
            if size < 4 * PE_ROWS * self.stripe_bytes or size & (size - 1):
                raise UserError(
                    f"{where}: {field} is {size}; choose a power of two of at least {4 * PE_ROWS * self.stripe_bytes}"
                )
        if not 1 <= self.queues <= 64:
            raise UserError(f"{where}: queues is {self.queues}; choose 1 ... 64")
        if not 2 <= self.instruction_buffer_depth <= 64:
            raise UserError(f"{where}: instruction_buffer_depth is {self.instruction_buffer_depth}; choose 2 ... 64")
        if not 16 <= self.dpa_bits <= 48:
            raise UserError(f"{where}: dpa_bits is {self.dpa_bits}; choose 16 ... 48")
        if not 1 <= self.clock_mhz <= 10_000:
            raise UserError(f"{where}: clock_mhz is {self.clock_mhz}; choose 1 ... 10000")

    @property
    def stripe_bytes(self) -> int:
        """Bytes the memory delivers in one cycle, and the alignment of every operand."""
        return self.channels * WORD_BYTES

    @property
    def stripe_values(self) -> int:
        """FP16 values in a stripe."""
        return self.channels * WORD_VALUES

    @property
    def multiply_adds(self) -> int:
        """FP16 multiply-add units."""
        return self.channels * PE_ROWS * WORD_VALUES

    @property
    def peak_gflops(self) -> float:
        """Two operations a multiply-add and cycle, in 1e9 per second."""
        return 2 * self.multiply_adds * self.clock_mhz / 1000

    @property
    def peak_gb_per_s(self) -> float:
        """Memory bandwidth in 1e9 bytes per second."""
        return self.stripe_bytes * self.clock_mhz / 1000

    @property
    def input_half_stripes(self) -> int:
        """Stripes of one half of the input buffer of each PE row: one half fills while the other feeds the array."""
        return self.input_buffer_bytes // (2 * PE_ROWS * self.stripe_bytes)

    @property
    def dram_buffer_stripes(self) -> int:
        """Depth of the DRAM buffer in stripes."""
        return self.dram_buffer_bytes // self.stripe_bytes

    @property
    def kept_words(self) -> int:
        """Words, per PE row, of the quarter of the output buffer that keeps the intermediate of a chain."""
        return self.output_buffer_bytes // (4 * PE_ROWS * WORD_BYTES)

    @property
    def bank_words(self) -> int:
        """Words, per PE row, of one bank of softmax terms."""
        return self.kept_words // SOFTMAX_BANKS

    def kept_stride(self, pairs: int, *, softmax: bool) -> int:
        """Words from one of ``pairs`` pairs of kept rows to the next: each has an equal power of two; 0 if too many.

        Softmax terms share a bank, any other intermediate all kept words.
        """
        return (self.bank_words if softmax else self.kept_words) >> (pairs - 1).bit_length()

    @property
    def result_half_words(self) -> int:
        """Words, per PE row, of one result half: one half is written to memory while the other fills."""
        return 3 * self.output_buffer_bytes // (8 * PE_ROWS * WORD_BYTES)


_KIB = 1024

PRESETS: dict[str, NdpConfig] = {
    config.name: config
    for config in (
        # For unit tests and proofs: every structure present, as little of each as works.
        NdpConfig(
            name="tiny",
            channels=2,
            input_buffer_bytes=8 * _KIB,
            dram_buffer_bytes=4 * _KIB,
            output_buffer_bytes=16 * _KIB,
            queues=2,
            instruction_buffer_depth=4,
            dpa_bits=24,
        ),
        # For co-simulation: a quarter of the array, buffers that hold real tiles.
        NdpConfig(
            name="small",
            channels=4,
            input_buffer_bytes=64 * _KIB,
            dram_buffer_bytes=64 * _KIB,
            output_buffer_bytes=64 * _KIB,
            queues=4,
            instruction_buffer_depth=8,
            dpa_bits=30,
        ),
        # The paper's core (section VII-H): 1024 multiply-adds at 1 GHz, 3 MB of buffers.
        NdpConfig(
            name="full",
            channels=16,
            input_buffer_bytes=1024 * _KIB,
            dram_buffer_bytes=1024 * _KIB,
            output_buffer_bytes=1024 * _KIB,
            queues=16,
            instruction_buffer_depth=16,
            dpa_bits=39,
        ),
    )
}


def preset(name: str) -> NdpConfig:
    """Return the preset called ``name``.

    Raises:
        UserError: there is no such preset; the message lists those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UserError(f"unknown device preset {name!r}; choose one of {', '.join(PRESETS)}") from None
