"""Ranks among each other: process groups, and checks that all run the same program in the same order."""
