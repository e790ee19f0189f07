"""Plans as figures: what a compiled step gathers and when, and how long and how much memory it should take."""
