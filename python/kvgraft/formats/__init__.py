"""Files: what kvgraft reads and writes, one module per format."""
