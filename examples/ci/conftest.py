"""Makes the fixture `training_step` known to the tests beside this file."""

pytest_plugins = ["forerun.interfaces.pytest_plugin"]
