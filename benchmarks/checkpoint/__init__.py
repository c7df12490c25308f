"""Checkpoints beside torch.distributed.checkpoint, torch.save and a copy: `python -m benchmarks.checkpoint`."""
