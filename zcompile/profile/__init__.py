"""Compares step time and peak memory of a model under several engines: `python -m zcompile.profile --help`."""
