"""The special function unit: scores to FP16 exponentials, online softmax. Contract: `plora.sim.golden.softmax`."""
