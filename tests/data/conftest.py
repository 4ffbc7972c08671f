"""Generated cases have no deadline: machines are shared, and no test here is about time."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
