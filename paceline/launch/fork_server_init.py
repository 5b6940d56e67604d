"""Imported by the fork server alone, before anything else: it takes no signal.

Launchers and terminals signal whole groups of processes. The server must not die of what is meant
for the supervisor, because its ranks would die with it; it leaves when the supervisor does. A rank
is as deaf until it has its own handlers; the supervisor repeats what it asks.
"""

import signal

DEAF_TO = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
for number in DEAF_TO:
    signal.signal(number, signal.SIG_IGN)
