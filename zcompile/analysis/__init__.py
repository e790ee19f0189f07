"""What a graph says and what it costs: graph vocabulary, lifetimes, cost model, hardware tables. Imports nothing above."""
