"""How long single calls take: formulas by op, built in and registered by users; `costs/model.py` adds them up."""
