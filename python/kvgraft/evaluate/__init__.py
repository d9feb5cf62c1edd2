"""Measuring what a mapper loses."""
