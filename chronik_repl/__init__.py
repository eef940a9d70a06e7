"""A flight recorder for Kafka producers: one log, shipped to followers, provably the same everywhere."""

__version__ = "0.1.0"
