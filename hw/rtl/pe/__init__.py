"""The PE array: FP16 products, exact fixed-point sums, one rounding. Numeric contract: docs/numerics.md."""
