"""Plain float64 models of what the GPU computes, to hold adapters and attention against."""
