"""Passes on FX graphs: one effect, one function, one file. pipeline.py lists them in order and runs them."""
