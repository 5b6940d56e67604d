"""`python -m paceline.check RUN_DIR`: one rank of a check, started by a launcher we call."""

import sys

from paceline.check.rank import CHECK
from paceline.launch.member import take_part

if __name__ == "__main__":
    sys.exit(take_part(CHECK, sys.argv[1:]))
