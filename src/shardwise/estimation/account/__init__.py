"""What a step does on one rank, noted while it runs without data: memory, arithmetic, transfers; and when it would be.

- `accounting`: the mode that notes it; `result_cache`: sizes of results that are known from equal ops
- `ledger`: which memory is there when, and what for; `tape`: kernels and transfers; `kernels`: what an op costs
- `forecast`: the trace of transfers; `autocast` and `gpu_kernels`: those of a GPU, where there is none
- `timeline`: when all of it happens, on ranks that wait for each other
"""
