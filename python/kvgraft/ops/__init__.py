"""The fused operation, its reference and its checks."""
