"""Links: named data, the flit slot model, and times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.hardware.flit import CxlFlit, load_flits
from plora.sim.hardware.link import load_link, load_links, occupancy_ns, one_way_ns, read_ns, wire_bytes, write_ns

ALL = sorted(load_links())


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("pcie5-x16", 64),
        ("cxl2-x8", 32),
        ("cxl3.1-x16", 128),
        ("nvlink-c2c", 450),
        ("nvlink4", 450),
        ("nvlink5", 900),
        ("nvlink6", 1800),
        ("ualink-200g", 800),
    ],
)
def test_named_links_have_their_published_rate_per_direction(name: str, rate: float) -> None:
    assert load_link(name).gb_per_s == rate


def test_every_number_of_every_link_has_a_source_and_a_status() -> None:
    for link in load_links().values():
        for key, fact in link.facts.items():
            assert len(fact.source) > 5 and fact.status != "user", (link.name, key)


@pytest.mark.parametrize(
    ("name", "read", "write"),
    [("cxl-256B", 0.8461538, 0.75), ("cxl-256B-latency-optimized", 0.8125, 0.70)],
)
def test_flit_efficiency_follows_from_the_slots(name: str, read: float, write: float) -> None:
    flit = load_flits()[name]
    assert flit.read_efficiency == pytest.approx(read, abs=1e-6)
    assert flit.write_efficiency == pytest.approx(write, abs=1e-6)


def test_flit_efficiency_agrees_with_the_reference_slot_model(shared_data: Path) -> None:
    reference = json.loads((shared_data / "cxl" / "flit256_slot_model.json").read_text())
    flits = load_flits()
    for key, name in (("standard 256B", "cxl-256B"), ("latency-optimised 256B", "cxl-256B-latency-optimized")):
        flit = flits[name]
        assert isinstance(flit, CxlFlit)
        expected = reference[key]
        assert flit.read_lines_per_flit == pytest.approx(expected["read_S2M_lines_per_flit"])
        assert flit.write_lines_per_flit == pytest.approx(expected["write_M2S_lines_per_flit"])
        assert flit.requests_per_flit == expected["read_M2S_reqs_per_flit_geometric_max"]
        assert flit.completions_per_flit == expected["write_S2M_NDR_per_flit_geometric_max"]


def test_the_68_byte_flit_charges_four_data_slots_and_a_share_of_a_header_slot() -> None:
    flit = load_flits()["cxl-68B"]
    assert isinstance(flit, CxlFlit)
    assert flit.read_lines_per_flit == pytest.approx(4 / 4.5)
    assert flit.write_lines_per_flit == pytest.approx(4 / 5)


def test_a_stream_of_reads_occupies_the_link_at_its_payload_efficiency() -> None:
    link = load_link("cxl3.1-x16")
    payload = 64 * 1_000_000
    rate = payload / occupancy_ns(link, wire_bytes(link, read_bytes=payload))
    assert rate == pytest.approx(108.31, abs=0.01)


def test_reads_and_writes_share_a_full_duplex_link() -> None:
    link = load_link("cxl3.1-x16")
    both = wire_bytes(link, read_bytes=1 << 20, write_bytes=1 << 20)
    alone = wire_bytes(link, read_bytes=1 << 20)
    assert occupancy_ns(link, both) < 1.6 * occupancy_ns(link, alone)


def test_without_protocol_only_payload_counts() -> None:
    link = load_link("cxl3.1-x16")
    wire = wire_bytes(link, read_bytes=1000, write_bytes=10, protocol="none")
    assert (wire.down, wire.up) == (10, 1000)


def test_a_lone_line_still_takes_a_whole_flit() -> None:
    link = load_link("cxl3.1-x16")
    wire = wire_bytes(link, read_bytes=1, burst=True)
    assert (wire.down, wire.up) == (256, 256)
    assert read_ns(link, 64) == pytest.approx(400 + 256 / 128)
    assert write_ns(link, 64) == pytest.approx(200 + 256 / 128)


def test_more_switches_add_their_hop() -> None:
    link = load_link("cxl3.1-x16")
    assert one_way_ns(link, extra_switches=2) - one_way_ns(link) == 2 * link.switch_hop_ns


def test_a_sweep_changes_the_total_rate_whatever_the_ports() -> None:
    assert load_link("nvlink5").with_rate(256).gb_per_s == pytest.approx(256)


@given(name=st.sampled_from(ALL), read=st.integers(0, 1 << 24), write=st.integers(0, 1 << 24))
def test_the_wire_never_carries_less_than_the_payload(name: str, read: int, write: int) -> None:
    wire = wire_bytes(load_links()[name], read_bytes=read, write_bytes=write)
    assert wire.up >= read and wire.down >= write


@given(
    name=st.sampled_from(ALL),
    sizes=st.lists(st.integers(0, 1 << 20), min_size=2, max_size=2),
)
def test_more_payload_never_takes_less_time(name: str, sizes: list[int]) -> None:
    link = load_links()[name]
    small, large = sorted(sizes)
    assert read_ns(link, small) <= read_ns(link, large)
    assert write_ns(link, small) <= write_ns(link, large)


def test_a_users_file_adds_a_link_with_bare_numbers_and_its_own_flit(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[mine]\ngb_per_s = 60\none_way_latency_ns = 250\nflit = "plain-90"\nduplex = "half"\n'
        '[flit.plain-90]\nkind = "plain"\nread_efficiency = 0.9\nwrite_efficiency = 0.9\n'
        'status = "user"\nsource = "mine"\n'
    )
    link = load_link("mine", path)
    assert link.facts["gb_per_s"].status == "user"
    assert occupancy_ns(link, wire_bytes(link, read_bytes=54, write_bytes=54)) == pytest.approx(2.0)
    assert load_link("cxl3.1-x16", path).gb_per_s == 128


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("gb_per_s = -1", "gb_per_s is -1"),
        ("gb_per_s = 0", "gb_per_s is 0"),
        ("gb_per_s = nan", "gb_per_s is nan"),
        ("gb_per_s = inf", "gb_per_s is inf"),
        ('gb_per_s = "128"', "gb_per_s"),
        ("gb_per_s = 1\nports = 0", "ports is 0"),
        ("gb_per_s = 1\nbandwidth = 3", "bandwidth"),
        ('gb_per_s = 1\nduplex = "simplex"', "duplex"),
        ("gb_per_s = {value = 1, status = 'guess', source = 'x'}", "status"),
        ("gb_per_s = {value = 1, status = 'choice', sauce = 'x'}", "gb_per_s"),
    ],
)
def test_bad_link_data_names_the_file_the_table_and_the_key(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'[mine]\none_way_latency_ns = 1\nflit = "cxl-256B"\n{line}\n')
    with pytest.raises(UserError) as caught:
        load_links(path)
    message = str(caught.value)
    assert "bad.toml: [mine]" in message and word in message and "\n" not in message


def test_an_unknown_flit_lists_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[mine]\ngb_per_s = 1\none_way_latency_ns = 1\nflit = "cxl-512B"\n')
    with pytest.raises(UserError, match=r"unknown flit format .* 'cxl-512B'; known: .*cxl-256B"):
        load_links(path)


def test_an_unknown_link_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown link 'nvlink9'; known: .*nvlink6"):
        load_link("nvlink9")


def test_a_missing_or_broken_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_links(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[mine\n")
    with pytest.raises(UserError, match=r"broken\.toml: not valid TOML .*line 1"):
        load_links(tmp_path / "broken.toml")


@pytest.mark.parametrize(("read", "write"), [(-1, 0), (0, -1), (float("nan"), 0)])
def test_a_negative_payload_is_refused(read: float, write: float) -> None:
    with pytest.raises(UserError, match="at least 0"):
        wire_bytes(load_link("cxl3.1-x16"), read_bytes=read, write_bytes=write)


@pytest.mark.parametrize(
    ("gigabytes", "rate", "simulated_ms"), [(6.722, 60, 113.47), (16.06, 60, 269.16), (6.722, 30, 225.49)]
)
def test_weights_on_cxl_devices_match_a_public_simulator(gigabytes: float, rate: float, simulated_ms: float) -> None:
    # LLMServingSim, Llama-3.1-8B in bf16 on four CXL devices of 250 ns: mean TPOT, the fullest device decides
    link = load_link("cxl3.1-x16").with_rate(rate)
    assert read_ns(link, gigabytes * 1e9, protocol="none") / 1e6 == pytest.approx(simulated_ms, rel=0.02)
