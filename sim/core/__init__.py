"""Cycle model of the NDP core: what a descriptor asks of the core, and when it gets it."""
