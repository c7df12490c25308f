"""Running a function on tensors without data.

- `stand_ins`: copies without data of all that a function refers to
- `fake_world`: a world of ranks that are not there; `as_rank`: what another rank of a world would have
- `rank_run`: a step as each kind of rank takes it
"""
