"""Modules whose parameters are all-gathered together in eager: which modules, their calls, and the order of ranks."""
