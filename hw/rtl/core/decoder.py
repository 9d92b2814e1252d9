"""The decoder: judges a descriptor and turns a legal one into work. `plora.hw.defs.legality` in hardware."""

from __future__ import annotations

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import (
    DOTS_PER_WORD,
    KEPT_MAX_TOKENS,
    KEPT_MAX_VALUES,
    PE_ROWS,
    SOFTMAX_MAX_ROWS,
    VALUE_BYTES,
    WORD_BYTES,
    NdpConfig,
)
from plora.hw.defs.descriptor import DType, Keep, Op, Source, Type
from plora.hw.defs.queue import (
    MAX_OPERAND_EXPONENT,
    RESULT_OFFSET,
    SCALE_MAX_EXPONENT,
    SCALE_MIN_EXPONENT,
    Exponents,
    operand_offset,
)
from plora.hw.defs.status import CHECK_ORDER, Status
from plora.hw.rtl.core.divider import SequentialDivider
from plora.hw.rtl.core.expander import MAX_EXPANSION
from plora.hw.rtl.core.geometry import ADDRESS_BITS, DIMENSION_BITS, WORD_VALUES_LOG2, geometry, geometry_layout, log2
from plora.hw.rtl.core.job import (
    SCALE_IGNORED_BITS,
    Destination,
    channel_bits,
    decoded_layout,
    stripe_count_bits,
)
from plora.hw.rtl.core.multiplier import SequentialMultiplier, multiply_steps
from plora.hw.rtl.interfaces import STATUS_BITS, fetched_layout
from plora.hw.rtl.pe.array import split_bits
from plora.hw.rtl.sfu.sfu import BANK_BITS

TRANSPOSED_GROUP_BITS = (KEPT_MAX_VALUES // DOTS_PER_WORD).bit_length()
"""Bits of the groups of a transposed operand that is legal."""
FP32_BIAS, FP32_FRACTION_BITS = 127, 23


def chain_state_layout(config: NdpConfig) -> data.StructLayout:
    """`plora.hw.defs.legality.ChainState`, field by field."""
    return data.StructLayout(
        {
            "kept_rows": DIMENSION_BITS,
            "kept_columns": KEPT_MAX_TOKENS.bit_length(),
            "kept_softmax": 1,
            "previous_rows": DIMENSION_BITS,
            "previous_columns": KEPT_MAX_TOKENS.bit_length(),
            "operand_rows": DIMENSION_BITS,
            "operand_columns": DIMENSION_BITS,
            "acc_rows": DIMENSION_BITS,
            "acc_batch": DIMENSION_BITS,
            "acc_split": split_bits(config),
            "acc_terms": config.accumulator.max_terms.bit_length(),
            "acc_transpose": 1,
            "acc_previous": 1,
        }
    )


products_layout = data.StructLayout(
    {name: 2 * DIMENSION_BITS for name in ("operand_values", "operand_stripes", "result_words", "stripes")}
)
"""Values of the GPU operand, stripes of it, words of the result, stripes of the device operand; of keys that are
integers beats."""

sums_layout = data.StructLayout({name: DIMENSION_BITS + 1 for name in ("taken", "tokens", "kept_columns")})
"""Terms summed with this descriptor, the tokens that there are, and the columns kept with those of this descriptor."""


class Decoder(wiring.Component):
    """Gives every descriptor the status of `plora.hw.defs.legality.check`, and work to the legal ones.

    It follows the chain: what its earlier descriptors left on the device, and whether one of them was
    refused, after which the rest is CHAIN_ABORTED. A verdict of the queue engine stands as it is.

    A descriptor takes `cycles` cycles, most of them spent on four products that are made two bits at a
    time. That is hidden behind the execution of the descriptors before it. With a transposed operand it waits
    for a quotient too, the stripes set aside for a group, and takes `transposed_cycles`.

    It deals out the banks of softmax terms in turns: a job that begins some gets the bank of those before the
    newest. So the newest terms lie in the bank dealt last, and the previous ones, if the chain has any, in the other.

    Ports:
        input: from the instruction buffer; the descriptor is taken when its outcome is.
        output: see `plora.hw.rtl.core.job`.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "input": In(stream.Signature(fetched_layout(config))),
                "output": Out(stream.Signature(decoded_layout(config))),
            }
        )

    @property
    def cycles(self) -> int:
        """Cycles from one outcome to the next where neither side waits."""
        return multiply_steps(DIMENSION_BITS) + 5

    @property
    def transposed_cycles(self) -> int:
        """The same for a transposed operand."""
        return max(multiply_steps(DIMENSION_BITS), stripe_count_bits(self._config)) + 5

    def elaborate(self, platform: object) -> Module:
        m = Module()
        config = self._config
        fetched = self.input.payload
        d = fetched.descriptor

        found = Signal(geometry_layout(config), name="geometry", reset_less=True)
        m.d.sync += found.eq(geometry(m, config, fetched))

        products = Signal(products_layout)
        start = Signal()
        done = []
        for name, (a, b) in {
            "operand_values": (d.device_columns, d.gpu_rows),
            "operand_stripes": (found.row_stripes, d.gpu_rows),
            "result_words": (found.row_words, d.gpu_rows),
            "stripes": (Mux(found.key_frames != 0, found.beats, found.group_stripes), found.groups),
        }.items():
            m.submodules[f"multiply_{name}"] = multiplier = SequentialMultiplier(DIMENSION_BITS)
            m.d.comb += [
                multiplier.a.eq(a),
                multiplier.b.eq(b),
                multiplier.start.eq(start),
                products[name].eq(multiplier.product),
            ]
            done.append(multiplier.done)

        # Stripes set aside for each group of a transposed operand.
        m.submodules.divide = divider = SequentialDivider(stripe_count_bits(config), TRANSPOSED_GROUP_BITS)
        m.d.comb += [
            divider.dividend.eq(d.device_bytes >> log2(config.stripe_bytes)),
            divider.divisor.eq(found.groups),
            divider.start.eq(start),
        ]

        # Beats of an operand as large as this one says that it is, at most: those before the last stripe's end.
        stated = Signal(signed(stripe_count_bits(config) + MAX_EXPANSION + 1))
        stated_stripes = d.device_bytes >> log2(config.stripe_bytes)
        m.d.sync += stated.eq((stated_stripes - found.key_frames) << found.expansion)

        # What the descriptor before this one left, and what this one finds.
        left = Signal(chain_state_layout(config))
        chain = Signal(chain_state_layout(config))
        aborted = Signal()
        with m.If(~fetched.first):
            m.d.comb += chain.eq(left)

        # Sums that the checks compare, a cycle ahead of them: one after the other would take longer than a cycle.
        after = Signal(sums_layout, reset_less=True)
        m.d.sync += [
            after.taken.eq(chain.acc_terms + d.device_columns),
            after.tokens.eq(Mux(d.source == Source.PREVIOUS, chain.previous_columns, chain.kept_columns)),
            after.kept_columns.eq(chain.kept_columns + d.device_rows),
        ]

        # Banks of softmax terms: that of the newest, and that of this descriptor.
        newest, bank = Signal(BANK_BITS), Signal(BANK_BITS)
        softmax, previous = d.op == Op.SOFTMAX, d.source == Source.PREVIOUS
        begins_terms = softmax & (d.keep == Keep.NEW)
        with m.If(softmax | d.transpose):
            m.d.comb += bank.eq(newest ^ (begins_terms | previous))

        faults = Signal(len(Status), reset_less=True)
        status = Signal(STATUS_BITS, reset_less=True)
        verdict = Signal()
        m.d.comb += verdict.eq(fetched.verdict != Status.OK)
        m.d.sync += faults.eq(self._faults(fetched, found, products, divider, chain, after, stated))

        with m.FSM():
            with m.State("GEOMETRY"):
                with m.If(self.input.valid):
                    m.next = "MULTIPLY"
            with m.State("MULTIPLY"):
                m.d.comb += start.eq(1)
                m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(Cat(done).all() & (divider.done | ~d.transpose)):
                    m.next = "SAY"
            with m.State("SAY"):
                with m.If(verdict):
                    m.d.sync += status.eq(fetched.verdict)
                with m.Elif(aborted & ~fetched.first):
                    m.d.sync += status.eq(Status.CHAIN_ABORTED)
                with m.Else():
                    m.d.sync += status.eq(Status.OK)
                    for code in reversed(CHECK_ORDER):  # of those that apply, the last assignment wins
                        with m.If(faults.bit_select(int(code), 1)):
                            m.d.sync += status.eq(code)
                m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += self.output.valid.eq(1)
                with m.If(self.output.ready):
                    m.d.comb += self.input.ready.eq(1)
                    m.d.sync += [
                        left.eq(0),
                        aborted.eq(d.chain & (status != Status.OK)),
                    ]
                    with m.If(begins_terms & (status == Status.OK)):
                        m.d.sync += newest.eq(~newest)
                    with m.If(d.chain & (status == Status.OK)):
                        self._leave(m, left, d, chain, found)
                    m.next = "GEOMETRY"

        record, work = self.output.payload.record, self.output.payload.work
        kept_word = Signal.like(work.kept_word)  # within the bank, or within the whole kept part
        m.d.comb += [
            record.descriptor.eq(d),
            record.queue.eq(fetched.queue),
            record.first.eq(fetched.first),
            record.verdict.eq(verdict),
            record.status.eq(status),
            record.result_address.eq(fetched.result_address),
            work.load.eq(d.source == Source.SLOT),
            work.from_kept.eq((d.source == Source.KEPT) | previous),
            work.operand_address.eq(fetched.operand_address >> channel_bits(config)),
            work.operand_stripes.eq(products.operand_stripes),
            work.row_stripes.eq(found.row_stripes),
            work.pairs.eq(found.pairs),
            work.single.eq(d.gpu_rows[0]),
            work.weights_address.eq(d.device_address >> log2(config.stripe_bytes)),
            # A legal operand that does not lie in groups apart has as many stripes as it says.
            work.stripes.eq(Mux(d.transpose, products.stripes, stated_stripes)),
            work.groups.eq(found.groups),
            work.beats.eq(found.beats),
            work.expansion.eq(found.expansion),
            work.group_stripes.eq(found.group_stripes),
            work.skip.eq(Mux(d.transpose, divider.quotient - found.group_stripes, 0)),
            work.tap.eq(found.taps_log2),
            work.split_log2.eq(found.split_log2),
            work.tail.eq(found.tail),
            work.group_rows.eq(found.group_rows),
            work.last_rows.eq(found.last_rows),
            work.continues.eq(d.acc_in),
            work.destination.eq(Destination.MEMORY),
            work.kept_stride.eq(found.kept_stride),
            work.row_words.eq(found.row_words),
            work.token_wise.eq(d.transpose),
            work.softmax.eq(softmax),
            work.begins.eq(d.keep == Keep.NEW),
            work.bank.eq(bank),
            work.kept_word.eq(Mux(bank, config.bank_words, 0) + kept_word),
            work.scale.eq(fetched.scale[SCALE_IGNORED_BITS:]),
            work.bf16.eq(d.dtype == DType.BF16),
            work.exponents.eq(fetched.exponents),
        ]
        with m.If(d.acc_out):
            m.d.comb += work.destination.eq(Destination.ACCUMULATORS)
        with m.Elif(d.keep != Keep.NONE):
            m.d.comb += work.destination.eq(Destination.KEPT)
        with m.If(d.transpose):
            m.d.comb += kept_word.eq(chain.acc_terms[WORD_VALUES_LOG2:])
        with m.Elif(d.keep == Keep.APPEND):
            m.d.comb += kept_word.eq(chain.kept_columns[WORD_VALUES_LOG2:])
        return m

    def _faults(
        self,
        fetched: data.View,
        g: data.View,
        products: data.View,
        divider: SequentialDivider,
        chain: data.View,
        after: data.View,
        stated: Value,
    ) -> Value:
        """One bit for every status code: `check`, with all its conditions side by side."""
        config = self._config
        d = fetched.descriptor
        n, k, b = d.device_rows, d.device_columns, d.gpu_rows
        softmax, from_slot, from_kept = d.op == Op.SOFTMAX, d.source == Source.SLOT, d.source == Source.KEPT
        from_previous = d.source == Source.PREVIOUS
        keeps = d.keep != Keep.NONE
        held = keeps | d.acc_out
        stripe_log2, word_log2 = log2(config.stripe_bytes), log2(WORD_BYTES)
        # An odd number of rows occupies the space of one more.
        padded_stripes = products.operand_stripes + Mux(b[0], g.row_stripes, 0)
        padded_words = products.result_words + Mux(b[0], g.row_words, 0)
        integers = g.expansion != 0
        # All beats lie in the stripes that are stated, and fewer are left over than share a stripe.
        spare = stated - products.stripes
        whole_stripes = d.device_bytes[:stripe_log2] == 0
        packed = whole_stripes & (spare >> g.expansion == 0)
        apart = whole_stripes & (divider.remainder == 0) & (divider.quotient >= g.group_stripes)
        operand_end = (products.operand_stripes << stripe_log2) + operand_offset(config)
        result_end = (products.result_words << word_log2) + RESULT_OFFSET
        scale_exponent = fetched.scale[FP32_FRACTION_BITS:]  # with the sign on top: beyond the largest if negative

        whole_words = chain.acc_terms[:WORD_VALUES_LOG2] == 0
        tokens_there = whole_words & Mux(d.acc_out, after.taken <= after.tokens, after.taken == after.tokens)
        kept_alike = (
            (b == chain.kept_rows)
            & (d.transpose == chain.kept_softmax)
            & Mux(d.transpose, tokens_there, k == chain.kept_columns)
        )
        operand_alike = (b == chain.operand_rows) & (k == chain.operand_columns)
        sums_alike = (
            (n == chain.acc_rows)
            & (b == chain.acc_batch)
            & (g.split_log2 == chain.acc_split)
            & (d.transpose == chain.acc_transpose)
            & (from_previous == chain.acc_previous)
            & (after.taken <= config.accumulator.max_terms)
        )
        appends = (
            (chain.kept_columns != 0)
            & (chain.kept_columns[:WORD_VALUES_LOG2] == 0)
            & (chain.kept_rows == b)
            & (chain.kept_softmax == softmax)
            & (after.kept_columns <= g.kept_limit)
        )
        conditions: dict[Status, Value] = {
            Status.BAD_TYPE: d.type != Type.READ_COMPUTE,
            Status.BAD_OP: (d.op != Op.GEMV) & (d.op != Op.GEMM) & ~softmax,
            Status.BAD_DTYPE: (d.dtype > max(DType)) | ((d.dtype > DType.BF16) & ~softmax & ~d.transpose),
            Status.BAD_FLAGS: (d.keep > Keep.APPEND)
            | (held & ~d.chain)
            | (keeps & d.acc_out)
            | (from_kept & (d.keep == Keep.NEW))
            | (softmax & (~keeps | from_kept | d.acc_in | d.transpose))
            | (d.transpose & (~(from_kept | from_previous) | keeps))
            | (from_previous & ~d.transpose),
            Status.BAD_RESERVED: d.reserved != 0,
            Status.ZERO_DIMENSION: (n == 0) | (k == 0) | (b == 0) | (d.gpu_columns == 0),
            Status.SHAPE_MISMATCH: (k != d.gpu_columns)
            | ((d.op == Op.GEMV) & (b != 1))
            | (k > config.accumulator.max_terms)
            | (softmax & (b > SOFTMAX_MAX_ROWS))
            | (~d.transpose & (from_kept | softmax) & (k > KEPT_MAX_VALUES))
            | (d.transpose & (n > KEPT_MAX_VALUES))
            | (integers & (g.taps_log2 != 0))
            | ((d.acc_in | d.acc_out) & ((g.pairs > 1) | (g.groups > 1) | (g.taps_log2 != 0))),
            Status.SIZE_MISMATCH: (d.gpu_bytes != products.operand_values << log2(VALUE_BYTES))
            | Mux(d.transpose, ~apart, ~packed),
            Status.MISALIGNED: d.device_address[:stripe_log2] != 0,
            Status.OUT_OF_WINDOW: ~g.above_base
            | ~g.limit_exists
            | g.room[ADDRESS_BITS]
            | (g.room[:ADDRESS_BITS] == 0)
            | (g.room[:ADDRESS_BITS] < d.device_bytes),
            Status.INPUT_TOO_LARGE: from_slot & (padded_stripes > PE_ROWS * config.input_half_stripes),
            Status.OUTPUT_TOO_LARGE: Mux(
                keeps,
                n > g.kept_limit,
                ~d.acc_out & (padded_words > PE_ROWS * config.result_half_words),
            ),
            Status.WEIGHTS_TOO_LARGE: (g.pairs > 1) & (g.group_stripes > config.dram_buffer_stripes),
            Status.SLOT_OVERFLOW: (from_slot & (operand_end > 1 << fetched.submission_slot_log2))
            | (~held & (result_end > 1 << fetched.result_slot_log2)),
            Status.BAD_SCALE: (
                softmax
                & (
                    (scale_exponent < FP32_BIAS + SCALE_MIN_EXPONENT)
                    | (scale_exponent > FP32_BIAS + SCALE_MAX_EXPONENT)
                )
            )
            | (
                (d.dtype == DType.BF16)
                & Cat(fetched.exponents[name] > MAX_OPERAND_EXPONENT for name in Exponents._fields).any()
            ),
            Status.CHAIN_BROKEN: (d.acc_in != (chain.acc_rows != 0))
            | (d.acc_in & ~sums_alike)
            | (from_kept & ~kept_alike)
            | (from_previous & ~((b == chain.previous_rows) & tokens_there))
            | ((d.source == Source.CHAIN) & ~operand_alike)
            | ((d.keep == Keep.APPEND) & ~appends),
        }
        return Cat(conditions.get(code, C(0, 1)) for code in sorted(Status))

    def _leave(self, m: Module, left: data.View, d: data.View, chain: data.View, g: data.View) -> None:
        """What a legal descriptor leaves to the next of its chain."""
        m.d.sync += left.eq(chain)
        with m.If(d.source == Source.SLOT):
            m.d.sync += [left.operand_rows.eq(d.gpu_rows), left.operand_columns.eq(d.device_columns)]
        with m.If(d.keep == Keep.NEW):
            m.d.sync += [
                left.kept_rows.eq(d.gpu_rows),
                left.kept_columns.eq(d.device_rows),
                left.kept_softmax.eq(d.op == Op.SOFTMAX),
                left.previous_rows.eq(0),
                left.previous_columns.eq(0),
            ]
            # Softmax terms go to the other bank; any other intermediate may overwrite both.
            with m.If((d.op == Op.SOFTMAX) & chain.kept_softmax):
                m.d.sync += [
                    left.previous_rows.eq(chain.kept_rows),
                    left.previous_columns.eq(chain.kept_columns),
                ]
        with m.Elif(d.keep == Keep.APPEND):
            m.d.sync += left.kept_columns.eq(chain.kept_columns + d.device_rows)
        with m.If(d.acc_out):
            m.d.sync += [
                left.acc_rows.eq(d.device_rows),
                left.acc_batch.eq(d.gpu_rows),
                left.acc_split.eq(g.split_log2),
                left.acc_terms.eq(chain.acc_terms + d.device_columns),
                left.acc_transpose.eq(d.transpose),
                left.acc_previous.eq(d.source == Source.PREVIOUS),
            ]
        with m.Else():
            m.d.sync += [
                left.acc_rows.eq(0),
                left.acc_batch.eq(0),
                left.acc_split.eq(0),
                left.acc_terms.eq(0),
                left.acc_transpose.eq(0),
                left.acc_previous.eq(0),
            ]
