"""Programs as Triton kernels."""
