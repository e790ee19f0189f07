"""Cost formulas: the bytes that a call of an op reads and writes, and its compute. `costs/model.py` adds up times."""
