"""Measures this machine: rates of kernels and transfers, kept in a file, for plans and predictions."""
