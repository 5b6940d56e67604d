"""`python -m paceline.run RUN_DIR`: one rank of a training run, started by a launcher we call."""

import sys

from paceline.launch.member import take_part
from paceline.run.rank import TRAIN

if __name__ == "__main__":
    sys.exit(take_part(TRAIN, sys.argv[1:]))
