"""What a model is, and running one."""
