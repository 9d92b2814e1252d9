"""Fits of model coefficients to measured tables. Run by hand; the simulator reads the committed results."""
