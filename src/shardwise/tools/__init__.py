"""Tools around the library.

- `cli`: the command line. `explanation`: what a call would move, computed on copies without data (`stand_ins`).
"""
