"""Paceline from Python: `import paceline` has these names (docs/python.md).

verbs       train, resume, plan, verify, sweep, compare: the command line's, with its words
runs        load_run: a run directory as records and pandas frames
attached    attach: a loop of your own gets the record, heartbeat, watchdog and report of a run

They stand above `cli`: what a person sees while they work is what the command line shows.
"""
