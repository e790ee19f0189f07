"""What a graph says and what it costs: graph vocabulary, liveness, parameter lifetimes, cost model, hardware tables.

Nothing here imports passes, sharding or the backend.
"""
