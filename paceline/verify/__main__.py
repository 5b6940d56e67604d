"""`python -m paceline.verify RUN_DIR`: one rank of a proof, started by a launcher we call."""

import sys

from paceline.launch.member import take_part
from paceline.verify.trial import VERIFY

if __name__ == "__main__":
    sys.exit(take_part(VERIFY, sys.argv[1:]))
