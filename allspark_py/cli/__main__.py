"""``python -m allspark.cli`` is the command ``allspark``."""

import sys

from . import main

sys.exit(main())
