from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.system.work import Batch, attended, serving


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 70)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(1, 7),
)
def test_attended_tokens_are_counted_as_they_lie(
    requests: list[tuple[int, int]], window: int | None, devices: int
) -> None:
    contexts = np.array([c for c, _ in requests], dtype=np.int64)
    near = np.array([n for _, n in requests], dtype=np.int64)
    read_near, read_far = attended(contexts, near, window, devices)
    for row, (context, copied) in enumerate(requests):
        seen = range(max(0, context - window) if window else 0, context)
        assert read_near[row] == sum(1 for token in seen if token < copied)
        for device in range(devices):
            expected = sum(1 for token in seen if token >= copied and token % devices == device)
            assert read_far[row, device] == expected, f"request {row}, device {device}"


def test_distinct_adapters_are_counted_and_the_base_model_is_none() -> None:
    batch = Batch(np.array([5, 6, 7, 8]), np.array([9, -1, 2, 9]))
    served = serving(batch, np.arange(10) * 8, 4)
    assert served.ids.tolist() == [2, 9]
    assert served.rows.tolist() == [1, 2]
    assert served.ranks.tolist() == [16, 72]
    assert served.devices.tolist() == [2, 1]


def test_sub_batches_deal_requests_in_turn() -> None:
    batch = Batch(np.arange(5), np.arange(5))
    parts = [batch.part(n, 2).contexts.tolist() for n in range(2)]
    assert parts == [[0, 2, 4], [1, 3]]
