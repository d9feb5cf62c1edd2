"""The offline demonstration and the small trained pair that it runs on."""
