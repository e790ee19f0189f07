"""Measures how fast this machine runs kernels and transfers between ranks. Passes plan transfers by these rates."""
