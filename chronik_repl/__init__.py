"""A flight recorder for Postgres and Kafka producers: one log, shipped to followers, provably the same everywhere."""

__version__ = "0.1.0"
