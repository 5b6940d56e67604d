"""`paceline diagnose`: what files alone say of a run that crashed, stalled, went well or was not
ours. flow.py gathers, `paceline.health` judges."""
