"""Spark: the log as a table and a stream, and the parity job. Shares only the layouts of frame and segment header."""
