"""From an unsharded model to shards: placements, a comparison of ranks' plans, and how modules read parameters."""
