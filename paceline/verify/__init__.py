"""Proof that a strategy computes what one process computes: `paceline verify`.

flow      which strategies, which cases, in which order
trials    the trials of one case: planned, launched once
trial     what each rank does in a trial, and what it leaves behind
judge     what was left behind, compared with one process and with the plan
"""
