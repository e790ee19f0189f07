"""The time of a step from its graph: formulas by op, hardware tables, and the model that adds them up."""
