"""The liberty reader: units, axes, odd punctuation, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.defs.errors import UserError
from plora.synth.liberty import Table, parse_liberty, read_liberty

TEXT = r"""
/* a foundry's style: ns and pF, load first, continued lines, missing semicolons */
library(odd) {
  time_unit : "1ns";
  capacitive_load_unit (1,pf);
  leakage_power_unit : "1uW";
  nom_voltage : 1.8;
  lu_table_template(t) {
    variable_1 : total_output_net_capacitance;
    variable_2 : input_net_transition;
    index_1 ("1, 2"); index_2 ("1, 2, 3");
  }
  cell (INV) {
    area : 16
    cell_leakage_power : 0.5;
    pin (A) { direction : input; capacitance : 0.01; }
    pin (Y) {
      direction : output; function : "(!A)";
      timing () {
        related_pin : "A"; timing_sense : negative_unate;
        cell_rise (t) { index_1 ("0.01, 0.03"); index_2 ("0.1, 0.2, 0.4"); \
          values ("0.1, 0.2, 0.4", \
                  "0.3, 0.4, 0.6"); }
        rise_transition (t) { index_1 ("0.01, 0.03"); index_2 ("0.1, 0.2, 0.4");
          values ("0.1, 0.1, 0.1", "0.2, 0.2, 0.2"); }
      }
    }
  }
  cell (NAND) {
    area : 24;
    pin (A) { direction : input; capacitance : 0.01; }
    pin (B) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "(!(A B))"; }
  }
  cell (FF) {
    area : 96;
    ff (IQ, IQN) { clocked_on : "CLK"; next_state : "D"; }
    pin (CLK) { direction : input; clock : true; capacitance : 0.02; }
    pin (D) {
      direction : input; capacitance : 0.01;
      timing () { related_pin : "CLK"; timing_type : setup_rising; rise_constraint (scalar) { values ("0.2"); } }
    }
    pin (Q) { direction : output; function : "IQ"; }
  }
}
"""


def test_everything_is_in_ps_ff_and_nw() -> None:
    library = parse_liberty(TEXT, "odd.lib")
    inverter = library.cells["INV"]
    assert inverter.input_ff == {"A": pytest.approx(10.0)}
    assert inverter.leakage_nw == pytest.approx(500.0)
    assert inverter.area == 16
    assert library.ge_area == 24
    assert library.vdd_v == 1.8
    assert library.cells["FF"].clock == "CLK"
    assert library.cells["FF"].setup["D"][0](0.0, 0.0) == pytest.approx(200.0)


def test_the_transition_axis_is_found_wherever_it_stands() -> None:
    (arc,) = parse_liberty(TEXT, "odd.lib").cells["INV"].arcs["Y"]
    rise = arc.delay[0]
    assert rise.slews_ps == pytest.approx((100.0, 200.0, 400.0))
    assert rise.loads_ff == pytest.approx((10.0, 30.0))
    assert rise(200.0, 30.0) == pytest.approx(400.0)
    # The file has no falling tables: the rising ones stand in.
    assert arc.delay[1] == rise


def test_tables_are_linear_between_and_beyond_their_points() -> None:
    table = Table((10.0, 20.0), (1.0, 3.0), ((1.0, 5.0), (2.0, 6.0)))
    assert table(15.0, 2.0) == pytest.approx(3.5)
    assert table(30.0, 5.0) == pytest.approx(3.0 + 8.0)
    assert Table((0.0,), (0.0,), ((7.0,),))(123.0, 456.0) == 7.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("library (x) { cell (A) { area : 1;", "not one complete library"),
        ("library (x) { } }", "closing brace too many"),
        ("cell (A) { }", "not one complete library"),
        ('library (x) { time_unit : "1ns"; capacitive_load_unit (1, furlong); }', "time or load unit"),
        ('library (x) { time_unit : "1ns"; capacitive_load_unit (1, pf); }', "no two-input NAND"),
    ],
)
def test_what_is_not_a_usable_library_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_liberty(text, "bad.lib")
    assert str(caught.value).startswith("bad.lib: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read liberty file .*no\.lib"):
        read_liberty(tmp_path / "no.lib")
