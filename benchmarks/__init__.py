"""Measurements against torch.distributed._shard, DTensor and plain tensors. Run with `make bench`."""
