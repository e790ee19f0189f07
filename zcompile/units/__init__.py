"""Modules whose parameters are gathered together in eager: found, gathered, reduced, and kept in one order."""
