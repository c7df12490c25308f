"""Communication between the ranks of a process group.

- `group`: a group's state, members and backend, and tagged messages between two ranks
- `peers`: what ranks write for each other in the store, lost ranks, and the watchdog
- `agreement`: calls in which all ranks agree or fail together
- `transfer`: what moves between two layouts, and how it is packed and sent
- `tracing`: a record of every collective
"""
