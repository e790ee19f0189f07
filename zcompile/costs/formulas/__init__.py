"""Cost formulas: what a call of an op reads, writes and computes. `costs/model.py` adds up the times."""
