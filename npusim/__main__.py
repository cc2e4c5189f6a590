"""`python -m npusim`: the command line."""

import sys

from npusim_command import main

sys.exit(main())
