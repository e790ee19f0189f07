"""How long single calls take: formulas by op, built in and registered by users; `costs/model.py` adds them up.

- `work.py`: what a formula says of a call, and what it is told.
- `registry.py`: users' formulas, and which of them a plan rests on.
- `products.py`, `attention.py`, `memory_ops.py`, `collectives.py`: the built-in formulas, by family.
- `formulas.py`: finds the formula of a node.
"""
