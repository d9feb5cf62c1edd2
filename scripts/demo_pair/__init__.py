"""Makes the small trained pair that the package ships for its offline demo."""
