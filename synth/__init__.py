"""What the RTL costs in silicon: area in gate equivalents, timing in FO4, power, and the SRAM beside them.

An open flow from package registries only: Yosys maps the emitted Verilog onto a shipped cell library
(or any liberty file), and everything after that, timing, power, tables, is plain Python. Depends on
`plora.hw` alone.
"""
