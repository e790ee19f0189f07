"""Predicts a step of a compiled model: what is gathered and when, how long it takes, and how much memory it needs."""
