"""Passes on FX graphs: one idea, one function, one file. pipeline.py has their map, their order and the runner."""
