"""Measures the rates of this machine, by which passes plan transfers: of kernels, and of transfers between ranks."""
