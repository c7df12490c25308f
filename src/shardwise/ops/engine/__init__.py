"""How a call of a torch function is computed on shards.

A call goes through these files, from the top; a cached call only through the first two:

- ``call_cache``: the cache key of a call, and the look-up of its program; the first call is recorded
- ``program``: the steps of a recorded call, as one function; ``steps``: those that are no ops of torch
- ``recorder``: observing the first call, and making its program
- ``decomposition``: functions as aten ops, and aten ops by the table, by decomposition or gathered
- ``gradient_proxy``, ``plain_operand``: plain operands that want a gradient; ``plain_values``: whether they are alike
- ``call``: one call of an aten op; ``table``: how each aten op is computed
- ``rule``: which dims of operands and results correspond; ``cells``, ``schedule``: how a rule is cut over ranks
- ``compute``: a call under a rule; ``result_metadata``: sizes and strides of its results
- ``runs``, ``routes``: a dim in one stretch for each rank, and rows that go where values say; ``without_elements``
- ``gathered``: the last resort, on whole operands; ``chunking``, ``noise``: even chunks, and random numbers
"""
