"""Whole systems: who computes what, where data lives, and how long a step takes."""
