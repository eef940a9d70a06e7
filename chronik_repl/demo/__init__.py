"""A cluster on one machine, a small shop that writes into it, a killed follower, and the proof that nothing differs."""
