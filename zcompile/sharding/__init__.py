"""From a whole model to shards: who owns which piece, how modules read it, and what ranks agree on first."""
