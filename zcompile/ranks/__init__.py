"""Process groups, and checks that all ranks run the same program and start collectives in the same order."""
