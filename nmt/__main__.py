"""`python -m nmt NAME ...`, the same as `nmt NAME ...`."""

import sys

from nmt.cli.main import nmt

sys.exit(nmt())
