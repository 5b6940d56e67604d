"""`paceline diagnose`: what the files of a run show, whether it crashed, stalled, went well or
belongs to another trainer. flow.py gathers, `paceline.health` judges."""
