"""Parts of scripts/soak: job (what is trained), program (a run as processes), faults, judge."""
