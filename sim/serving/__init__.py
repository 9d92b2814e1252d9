"""Serving: requests that arrive, wait, are batched continuously, and leave.

`options` is what a run is, `steps` the time of a step with prompts and decoding requests, `memory`
what occupies KV blocks and adapter slots, `simulate` the loop, `metrics` what users ask for.
"""
