"""Whole parameters on purpose: unshard, full_parameters, generate."""
