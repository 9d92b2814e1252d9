"""Serving: requests that arrive, wait, are batched continuously, and leave.

`options` is what a run is, `steps` the time of a step with prompts and decoding requests, `capacity` and
`memory` what occupies KV blocks and adapter slots, `prefix` what prompts have in common, `decoding` the
running batch with the manager's decisions, `replica` queue, admission and steps of one copy of the system,
`simulate` the loop over replicas, `outcome` and `metrics` what happened, `bounds` what it waited for,
`validation` a recorded run beside a simulated one.
"""
