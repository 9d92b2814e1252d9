"""The plot and the table of trades."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from plora.synth.library import node
from plora.synth.trade import Point, points_data, points_text, scatter_svg

POINTS = [Point("area 100%", 1900.0, 46.0), Point("area 80%", 2000.0, 44.0), Point("delay 100%", 2600.0, 38.0)]


def test_the_plot_is_an_image_with_every_point_inside() -> None:
    image = ElementTree.fromstring(scatter_svg(POINTS, node("45nm"), 1.0))
    width, height = float(image.get("width", 0)), float(image.get("height", 0))
    circles = [tag for tag in image.iter() if tag.tag.endswith("circle")]
    assert len(circles) == len(POINTS) + 2, "a circle for each point and one for each recipe's name"
    for circle in circles:
        assert 0 < float(circle.get("cx", 0)) < width
        assert 0 < float(circle.get("cy", 0)) < height
    # Further up is faster, further right is larger.
    first, _, last = circles[: len(POINTS)]
    assert float(last.get("cy", 0)) < float(first.get("cy", 0))
    assert float(last.get("cx", 0)) > float(first.get("cx", 0))
    assert {"area", "delay"} <= {tag.text for tag in image.iter() if tag.text}


def test_a_node_turns_fo4_into_ghz() -> None:
    at = node("45nm")
    data = points_data(POINTS, at)
    assert data[0] == {"what": "area 100%", "ge_per_multiply_add": 1900.0, "period_fo4": 46.0, "fmax_ghz": 1.035}
    assert "1.04" in points_text(POINTS, at)
