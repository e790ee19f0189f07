"""Unsharded parameters outside of training (unshard, full_parameters), and text generation on all ranks (generate)."""
