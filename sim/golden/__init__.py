"""Bit-exact functions of the core's arithmetic, in numpy."""
