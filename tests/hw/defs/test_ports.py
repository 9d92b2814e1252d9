"""The port list names what the AXI signatures hold."""

import pytest
from amaranth.hdl import Value
from amaranth.lib import wiring

from plora.hw.defs.config import PRESETS, NdpConfig
from plora.hw.defs.ports import HOST_ID_BITS, MEMORY_ID_BITS, axi4_lite_members, axi4_members, device_ports
from plora.hw.rtl.front.axi import Axi4LiteSignature, Axi4Signature, msix_signature


@pytest.mark.parametrize("config", PRESETS.values(), ids=lambda c: c.name)
def test_port_names_are_distinct_and_every_bus_is_whole(config: NdpConfig) -> None:
    names = [p.name for p in device_ports(config)]
    assert len(names) == len(set(names))
    per_bus = len(axi4_members(MEMORY_ID_BITS))
    assert len(names) == 2 + per_bus * (config.channels + 1) + len(axi4_lite_members()) + 3


@pytest.mark.parametrize("id_bits", [MEMORY_ID_BITS, HOST_ID_BITS])
def test_signature_is_the_member_list(id_bits: int) -> None:
    signature = Axi4Signature(id_bits)
    assert signature == Axi4Signature(id_bits) != Axi4Signature(id_bits + 1)
    flat = {path[0]: (member.flow, len(Value.cast(v))) for path, member, v in signature.flatten(signature.create())}
    assert flat == {m.name: (wiring.Out if m.by_manager else wiring.In, m.width) for m in axi4_members(id_bits)}


def test_lite_signature_and_interrupt_stream() -> None:
    assert Axi4LiteSignature() == Axi4LiteSignature()
    assert set(Axi4LiteSignature().members) == {m.name for m in axi4_lite_members()}
    ports = {p.name: p.width for p in device_ports(PRESETS["tiny"])}
    assert len(Value.cast(msix_signature().create().payload)) == ports["msix__payload"]


def test_id_bits_must_be_positive() -> None:
    with pytest.raises(TypeError, match="not 0"):
        Axi4Signature(0)
