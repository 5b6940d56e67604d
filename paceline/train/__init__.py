"""Training: `loop` is the only loop, `worker` is what each rank runs around it."""
