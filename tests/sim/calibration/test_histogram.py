"""The picture holds every value once."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from plora.sim.calibration.histogram import histogram_svg


def test_bars_count_all_values_and_open_ends_take_the_rest() -> None:
    groups = {"calm": [-9.0, 0.0, 0.1], "stalls <0.3": [0.1, 5.0]}
    picture = histogram_svg(groups, [-1.0, 0.0, 1.0], "errors", "percent")
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    # Above the bars: one value below -1, three from 0 to 1, one above (none from -1 to 0). Below the axis: 0 and 1.
    assert [text for text in texts if re.fullmatch(r"\d", text)] == ["1", "3", "1", "0", "1"]
    assert "stalls <0.3 (2)" in texts and "errors" in texts


def test_no_values_make_an_empty_picture() -> None:
    assert ElementTree.fromstring(histogram_svg({"none": []}, [0.0], "nothing", "cycles")).tag.endswith("svg")
