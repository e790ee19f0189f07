"""Compares step time and peak memory of a model under several engines: `zcompile profile --help`."""
