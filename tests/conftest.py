"""Settings of all tests; modules beside this file can be imported by every test."""

from hypothesis import Phase, settings

# The first call of a compiled function takes seconds, so no example has a deadline.
settings.register_profile("forerun", deadline=None)
# What benchmarks/mutants uses: it wants to know soon whether a test fails, and not on which smallest example.
settings.register_profile("first-failure", deadline=None, max_examples=30, phases=(Phase.explicit, Phase.generate))
settings.load_profile("forerun")
