"""Modules whose parameters are all-gathered together in eager: which modules, their calls, their collectives."""
