"""Passes on FX graphs, one idea a file. pipeline.py has their order, and runs and verifies them."""
