"""The GPU memory manager of the paper, section VI: cost model, strategy selection, temperature."""
