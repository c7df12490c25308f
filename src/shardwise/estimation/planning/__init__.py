"""Choosing how a model is trained on given devices: `auto` predicts each way, and takes the fastest that fits.

- `work`: what is trained: the model, the batch, the optimizer
- `candidate`: one way to train it: who has which part of the model, and how many samples
- `probes`: what models of three and of four blocks cost, by which the cost of all blocks is known
- `shares`: how many samples and which share of the states each rank gets, by a solver of linear programs
- `shortened_steps`: what these models cost with the shares of one candidate, where ranks share layers
- `auto`: all ways compared, and the choice in words
"""

from shardwise.estimation.planning.auto import AutoPlan, auto, estimate_candidate
from shardwise.estimation.planning.candidate import Candidate

__all__ = ["AutoPlan", "Candidate", "auto", "estimate_candidate"]
