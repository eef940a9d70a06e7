"""The log: frames in segments, group commit, recovery, reading, retention. It knows nothing of replication."""
