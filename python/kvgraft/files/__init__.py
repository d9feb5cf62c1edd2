"""Files: safetensors, atomic writes, and what a file is."""
