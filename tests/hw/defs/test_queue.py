"""Valid words and completion lines: stale memory never reads as valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.descriptor import FIELDS, Descriptor
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import COMPLETION_FIELDS, VALID_OFFSET, Completion, submission_line, valid_word

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


@given(descriptors, st.integers(0, (1 << 24) - 1))
def test_submission_line_holds_descriptor_and_valid_word_and_zeros_between(d: Descriptor, number: int) -> None:
    line = submission_line(d, number)
    assert Descriptor.unpack(line) == d
    assert line[26:VALID_OFFSET] == bytes(34)
    assert int.from_bytes(line[VALID_OFFSET:], "little") == valid_word(number)


def test_completion_refuses_another_length() -> None:
    with pytest.raises(UserError, match="64 bytes, not 63"):
        Completion.unpack(bytes(63))
