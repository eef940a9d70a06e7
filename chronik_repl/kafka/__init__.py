"""The front door: Kafka's protocol over the log."""
