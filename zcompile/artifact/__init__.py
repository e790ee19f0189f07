"""Compile once, load everywhere: one file with all that a first step compiles, made by one process for every rank."""
