"""Artifacts: files with the compiled code of a model, which one process compiles and every rank loads."""
