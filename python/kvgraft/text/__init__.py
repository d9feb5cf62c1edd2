"""Calibration and held-out text."""
