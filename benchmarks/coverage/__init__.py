"""Which of torch's ops work on sharded tensors: forward and backward, for shardwise and for DTensor."""
