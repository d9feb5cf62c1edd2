"""Reading text: calibration text for a fit, held-out text for an evaluation."""
