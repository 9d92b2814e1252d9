"""Which experts a batch touches."""

from __future__ import annotations

from plora.hw.defs.errors import UserError


def expected_distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """Expected number of distinct experts that `tokens` tokens touch in one layer.

    Exact under uniform, independent routing: a token misses a given expert with probability
    1 - k/E, so the expectation is E (1 - (1 - k/E)^tokens). `tokens` may be fractional (a mean).
    Raises :class:`UserError` unless 1 <= k <= E and tokens >= 0.
    """
    if not 1 <= experts_per_token <= num_experts:
        raise UserError(f"experts per token is {experts_per_token}; give 1 to {num_experts}, the number of experts")
    if not tokens >= 0:
        raise UserError(f"tokens is {tokens!r}; give a number of at least 0")
    return float(num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** tokens))
