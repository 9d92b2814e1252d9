"""The descriptor's bits: Python, the Amaranth layout and the generated C header say the same."""

import pytest
from amaranth.lib import data
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.descriptor import DESCRIPTOR_BITS, DESCRIPTOR_BYTES, FIELDS, HEADER_BITS, Descriptor, Field, field
from plora.hw.defs.errors import UserError
from plora.hw.rtl.interfaces import descriptor_layout


def values(width: int) -> st.SearchStrategy[int]:
    top = (1 << width) - 1
    return st.sampled_from((0, 1, top, top >> 1, 1 << width - 1)) | st.integers(0, top)


descriptors = st.builds(Descriptor, **{f.name: values(f.width) for f in FIELDS})


def test_fields_tile_204_bits_as_the_paper_says() -> None:
    assert DESCRIPTOR_BITS == 204
    position = 0
    for f in FIELDS:
        assert f.offset == position, f.name
        position += f.width
    assert position == DESCRIPTOR_BITS
    # Fig. 4: 20 bits of type, operation, data type; 64 of address; six sizes and dimensions of 20.
    assert field("device_address").offset == HEADER_BITS
    assert [f.width for f in FIELDS if f.offset >= HEADER_BITS] == [64] + 6 * [20]


@given(descriptors)
def test_unpack_is_the_inverse_of_pack(d: Descriptor) -> None:
    data_ = d.pack()
    assert len(data_) == DESCRIPTOR_BYTES
    assert Descriptor.unpack(data_) == d
    assert int.from_bytes(data_, "little") >> DESCRIPTOR_BITS == 0


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_a_field_occupies_exactly_its_bits(f: Field) -> None:
    zero = Descriptor(**{g.name: 0 for g in FIELDS})
    full = Descriptor(**{g.name: (1 << f.width) - 1 if g is f else 0 for g in FIELDS})
    assert int.from_bytes(zero.pack(), "little") == 0
    assert int.from_bytes(full.pack(), "little") == (1 << f.width) - 1 << f.offset


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
@pytest.mark.parametrize("excess", [-1, 0], ids=["negative", "too wide"])
def test_pack_refuses_what_does_not_fit_and_names_the_field(f: Field, excess: int) -> None:
    value = excess if excess < 0 else 1 << f.width
    with pytest.raises(UserError, match=rf"field {f.name} is {value}:"):
        Descriptor(**{f.name: value}).pack()


def test_unpack_refuses_a_short_buffer() -> None:
    with pytest.raises(UserError, match="26 bytes, not 25"):
        Descriptor.unpack(bytes(DESCRIPTOR_BYTES - 1))


@given(descriptors)
def test_amaranth_layout_reads_the_packed_bytes_alike(d: Descriptor) -> None:
    assert data.Layout.cast(descriptor_layout).size == DESCRIPTOR_BITS
    constant = descriptor_layout.from_bits(int.from_bytes(d.pack(), "little"))
    assert {f.name: constant[f.name] for f in FIELDS} == {f.name: getattr(d, f.name) for f in FIELDS}
    assert descriptor_layout.const({f.name: int(getattr(d, f.name)) for f in FIELDS}).as_bits() == int.from_bytes(
        d.pack(), "little"
    )


def test_describe_names_what_has_a_name_and_shows_what_has_not() -> None:
    assert Descriptor(op=1, device_rows=8, device_columns=64, chain=1).describe().startswith("read_compute gemv fp16")
    assert "dtype=7?" in Descriptor(dtype=7).describe()
