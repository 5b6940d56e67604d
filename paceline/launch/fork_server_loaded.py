"""Imported by the fork server alone, after all else: nothing that it has loaded is garbage.

Ranks are forks of it. Their collector would walk torch's half a million objects first, 0.16 s in
each rank of each attempt, and by writing to them copy the pages that all ranks share.
"""

import gc

gc.freeze()
gc.enable()
