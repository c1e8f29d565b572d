"""Settings of all tests; modules beside this file can be imported by every test."""

from hypothesis import settings

# The first call of a compiled function takes seconds, so no example has a deadline.
settings.register_profile("forerun", deadline=None)
settings.load_profile("forerun")
