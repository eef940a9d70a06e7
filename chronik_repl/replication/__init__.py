"""Shipping the log: rings, messages, epochs, progress, the leader's shipper and the follower's receiver."""
