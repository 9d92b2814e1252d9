"""Hardware as data files and pure functions: GPU, links, DRAM, and the near-data device.

Nothing here keeps state or knows of requests; the event-driven system model composes these.
Times are nanoseconds, rates 1e9 bytes per second (so GB/s is bytes per nanosecond).
"""
