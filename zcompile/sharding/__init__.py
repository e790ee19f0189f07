"""From an unsharded model to shards: placements, a check that ranks shard alike, and how modules read parameters."""
