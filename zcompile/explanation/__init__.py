"""Predicts a step of a compiled model: which parameters are gathered and when, the step's time, and its memory."""
