"""The numbers of a run, sent to trackers: TensorBoard, W&B, MLflow, Trackio, Aim.

sinks       what each tracker is called with: one small class each, and the list of them
process     `python -m paceline.track NAME RUN_DIR`: reads training.csv as it grows, and sends
flow        starts one such process per tracker, and ends it with the run

A tracker is a process of its own that reads the run's files: whatever it does, hangs in or dies of,
no rank waits for it.
"""
