"""Valid words and completion lines: stale memory never reads as valid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.descriptor import FIELDS, Descriptor
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import (
    ANCHOR_FIELDS,
    COMPLETION_FIELDS,
    SUBMISSION_FIELDS,
    VALID_OFFSET,
    Anchor,
    Completion,
    Exponents,
    exponents_of,
    softmax_scale,
    softmax_scale_allowed,
    softmax_scale_of,
    submission_line,
    valid_word,
)

descriptors = st.builds(Descriptor, **{f.name: st.integers(0, (1 << f.width) - 1) for f in FIELDS})


@given(
    st.builds(
        Completion,
        descriptor=descriptors,
        **{f.name: st.integers(0, (1 << 8 * f.size) - 1) for f in COMPLETION_FIELDS if f.name != "descriptor"},
    )
)
def test_completion_unpack_is_the_inverse_of_pack(completion: Completion) -> None:
    assert Completion.unpack(completion.pack()) == completion


@given(st.integers(0, 1 << 30))
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0xA5])
def test_filled_memory_is_never_valid(byte: int, number: int) -> None:
    assert valid_word(number).to_bytes(4, "little") != bytes([byte]) * 4


@given(st.integers(0, 1 << 24), st.integers(1, (1 << 24) - 1))
def test_another_pass_is_never_valid(number: int, later: int) -> None:
    assert valid_word(number) != valid_word(number + later)


@given(descriptors, st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 32) - 1))
def test_submission_line_holds_descriptor_scale_and_valid_word_and_zeros_between(
    d: Descriptor, number: int, scale: int
) -> None:
    line = submission_line(d, number, scale)
    assert Descriptor.unpack(line) == d
    assert softmax_scale_of(line) == scale == int.from_bytes(line[32:36], "little")
    assert line[26:32] == bytes(6) and line[36:VALID_OFFSET] == bytes(24)
    assert int.from_bytes(line[VALID_OFFSET:], "little") == valid_word(number)
    assert submission_line(d, number) == submission_line(d, number, 0)


@given(
    st.builds(
        Anchor,
        anchor=st.integers(-(1 << 31), (1 << 31) - 1),
        shift=st.integers(0, 255),
        flags=st.integers(0, 255),
        sum=st.integers(0, (1 << 64) - 1),
    )
)
def test_anchor_unpack_is_the_inverse_of_pack(anchor: Anchor) -> None:
    assert Anchor.unpack(anchor.pack()) == anchor


def test_line_fields_do_not_overlap_and_stay_in_their_line() -> None:
    for fields in (SUBMISSION_FIELDS, COMPLETION_FIELDS, ANCHOR_FIELDS):
        end = 0
        for field in fields:
            assert field.offset >= end
            end = field.offset + field.size
        assert end <= 64


def fp32(bits: int) -> float:
    return float(np.array(bits, np.uint32).view(np.float32))


@given(st.floats(2.0**-24, 2.0**8, exclude_max=True))
def test_the_scale_is_rounded_to_the_bits_that_the_device_uses(factor: float) -> None:
    bits = softmax_scale(factor)
    assert softmax_scale_allowed(bits) and bits % (1 << 7) == 0
    assert abs(fp32(bits) - factor) <= 2.0**-17 * factor or factor > 2.0**8 * (1 - 2.0**-17)


@pytest.mark.parametrize("bits", [-1, 1 << 32])
def test_a_scale_of_more_than_32_bits_is_refused(bits: int) -> None:
    with pytest.raises(UserError, match="softmax scale"):
        submission_line(Descriptor(), 1, bits)


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0**-25, 2.0**8, float("nan"), float("inf")])
def test_a_scale_out_of_range_is_refused(factor: float) -> None:
    with pytest.raises(UserError, match="softmax scale"):
        softmax_scale(factor)


def test_completion_and_anchor_refuse_another_length() -> None:
    with pytest.raises(UserError, match="64 bytes, not 63"):
        Completion.unpack(bytes(63))
    with pytest.raises(UserError, match="64 bytes, not 63"):
        Anchor.unpack(bytes(63))


@given(st.integers(-128, 127), st.integers(-128, 127), st.integers(-128, 127))
def test_exponents_lie_beside_the_scale(operand: int, device: int, kept: int) -> None:
    exponents = Exponents(operand, device, kept)
    line = submission_line(Descriptor(), 3, 0x12345678, exponents)
    assert exponents_of(line) == exponents
    assert [byte - 256 * (byte > 127) for byte in line[36:39]] == [operand, device, kept]
    assert line[:36] + bytes(3) + line[39:] == submission_line(Descriptor(), 3, 0x12345678)
    assert exponents.allowed() == (max(exponents) <= 39)


@pytest.mark.parametrize("exponent", [-129, 128])
def test_an_exponent_of_more_than_a_byte_is_refused(exponent: int) -> None:
    with pytest.raises(UserError, match="device exponent"):
        submission_line(Descriptor(), 0, 0, Exponents(0, exponent))
