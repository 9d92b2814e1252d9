"""The table of errors: its lines are made, and BF16 results are the nearest ones."""

from __future__ import annotations

import pytest

from tests.bench.numeric_error import BF16_CASES, CASES, Case, bf16_line, fp16_line


@pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: case.name)
def test_bf16_results_are_the_correctly_rounded_sums(case: Case) -> None:
    assert bf16_line(case, 128).split()[-3] == "0.00%"


def test_fp16_results_of_weights_and_activations_are_too() -> None:
    assert fp16_line(CASES[0], 128).split()[-3] == "0.00%"
