"""What a call would move, what a step would need, and which plan is best: all without data and without devices.

- `explanation`: `explain`, the transfers of a call; `estimate`: the memory and the time of a step on every rank
- `rank_estimate`, `fit`, `model_rows`: what is told of a rank, whether it fits, and the model for a page
- `without_data/`: running a function on tensors without data; `account/`: what is noted meanwhile
- `devices/`: what devices can do, by name or measured; `planning/`: the fastest plan that fits
"""
