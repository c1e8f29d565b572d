"""Python imports this module at the start of a process that a test starts while tests are recorded."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import watching

del sys.path[0]
watching.watch_this_process()
