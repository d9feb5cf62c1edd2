"""What a mapped cache is worth, measured on text the fit has not seen."""
