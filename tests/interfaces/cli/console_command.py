"""Where the console command of this installation is."""

import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("forerun")
