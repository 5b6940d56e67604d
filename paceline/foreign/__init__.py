"""Runs of other trainers: their logs, flight recorders and traces become a run directory that
`paceline watch`, `diagnose` and Python read as one of ours.

    logs.py, progress.py   text -> rows by step, phases by rank, faults
    failures.py            how torchrun, NCCL and Python say what went wrong
    pickles.py, flight.py  dumps of NCCL's flight recorder, without unpickling; who waits for whom
    flow.py                which file is what; writes training.csv, ranks/*, imported.json
"""
