"""Watching a rank from a thread of its own: heartbeat and telemetry. Training never waits."""
