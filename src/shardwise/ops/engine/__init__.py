"""What a call of an op comes down to on shards, and running it."""
