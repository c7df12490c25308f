"""Print every measurement as a table: `make bench`."""

from __future__ import annotations

import sys

from benchmarks import (
    boxes,
    command_line,
    experts,
    fully_sharded,
    generation,
    host_time,
    layers,
    models,
    ops,
    optimizers,
    sequences,
    state_transfer,
    tensors,
    training,
    transfers,
)
from benchmarks.checkpoint.report import measure as measure_checkpoints
from benchmarks.scale.processes import Request, measure
from benchmarks.table import show, show_fractions
from shardwise.testing import run_on_ranks


def main() -> int:
    """Run the measurements one after the other, each on processes that do nothing else."""
    rows = run_on_ranks(1, tensors.small_ops, timeout=300, fresh=True)[0]
    show("Small ops on one rank", rows)
    made = run_on_ranks(1, tensors.creation, timeout=300, fresh=True)[0]
    made += run_on_ranks(4, tensors.creation, timeout=300, fresh=True)[0]
    show("Creation", made)
    built = run_on_ranks(1, boxes.build, timeout=550, fresh=True)[0]
    show("Layouts of many boxes", built)
    moved = run_on_ranks(4, transfers.reshard, timeout=300, fresh=True)[0]
    show("Transfers (plain: one raw all_to_all_single of as many bytes, into memory that is there)", moved)
    gathered, extra = run_on_ranks(4, transfers.gather, timeout=300, fresh=True)[0]
    show("Uneven gather", gathered)
    print("\n  extra memory on the destination, MiB: " + ", ".join(f"{who} {mib:.1f}" for who, mib in extra.items()))
    planned = run_on_ranks(1, transfers.plan, timeout=300, fresh=True)[0]
    show("Planning", planned)
    received = run_on_ranks(8, transfers.mesh_bytes, timeout=300, fresh=True)[0]
    show_fractions("Received by each of 8 ranks on average, as a fraction of the tensor, counted on gloo", received)
    computed = run_on_ranks(1, ops.small_ops, timeout=300, fresh=True)[0]
    show("Ops on one rank", computed)
    stepped_alone = run_on_ranks(1, host_time.measure, timeout=300, fresh=True)[0]
    show("Processor time of a training step in a world of one", stepped_alone)
    called = run_on_ranks(2, models.measure, timeout=600, fresh=True)[0]
    show("Processor time of a step of tiny transformers on 2 ranks", called)
    called += generation.run() + command_line.run()
    looked_up = run_on_ranks(4, ops.embedding, timeout=550, fresh=True)[0]
    show("Embedding", looked_up)
    trained = run_on_ranks(4, layers.linear, timeout=300, fresh=True)[0]
    trained += run_on_ranks(4, layers.training, timeout=550, fresh=True)[0]
    show("Tensor parallelism (DTensor by torch.distributed.tensor.parallel; by hand: plain parts, all_reduce)", trained)
    trained += [training.run(plan) for plan in training.PLANS]
    trained += fully_sharded.run() + fully_sharded.run(ranks=1)
    trained += experts.run()
    trained += sequences.run()
    stepped = run_on_ranks(1, optimizers.step, timeout=550, fresh=True)[0]
    show("Optimizers on one rank (plain: torch.optim on the same local tensors)", stepped)
    kept = measure_checkpoints()
    sent = state_transfer.measure()
    built += (
        moved + gathered + planned + computed + stepped_alone + called + looked_up + trained + stepped + kept + sent
    )
    over = [row.work for row in [*rows, *made, *built] if row.verdict in ("OVER", "RAISES")]
    over += [line.title for line in measure(Request())]
    print(f"\nover budget, or raising: {', '.join(over)}" if over else "\nevery budget is held")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
