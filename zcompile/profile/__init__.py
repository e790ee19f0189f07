"""Compares step time and peak memory of a model under several engines, such as FSDP2: `zcompile profile --help`."""
