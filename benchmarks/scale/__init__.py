"""What one rank pays in worlds of up to 16,384 ranks, in one process on torch's `fake` backend."""
