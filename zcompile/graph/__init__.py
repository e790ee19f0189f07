"""Nodes of FX graphs: names and helpers, liveness of tensors, lifetimes of parameters."""
