"""How all tests run: Hypothesis makes the same examples every time, and takes its time on a busy machine."""

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")
