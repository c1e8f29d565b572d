"""The virtual world of a program that measures itself, without a coordinator and without files."""

import tempfile

from forerun.sources.trace.inside.world import World
from forerun.sources.trace.job import Job


def made_world(world_size, **settings):
    """The world of rank 0, whose recorder the program starts itself. The folder of its job is gone at once."""
    with tempfile.TemporaryDirectory() as folder:
        return World(Job(folder=folder, world_size=world_size, steps=1 << 30, **settings))
