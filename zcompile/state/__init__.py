"""The sharded parameters of a model, their placement, transport and statistics."""
