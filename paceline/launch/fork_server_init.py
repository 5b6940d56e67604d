"""Imported by the fork server alone, before anything else: it makes the server ignore signals, and
leave garbage alone while it imports (fork_server_loaded.py ends that).

Launchers and terminals signal whole groups of processes. The server must not die of what is meant
for the supervisor, because its ranks would die with it; it leaves when the supervisor does. A rank
ignores signals too until it has its own handlers; the supervisor repeats what it asks.
"""

import gc
import signal

IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
for number in IGNORED:
    signal.signal(number, signal.SIG_IGN)
gc.disable()
