"""`python -m npusim`: the command line."""

import sys

from npusim.cli.main import main

sys.exit(main())
