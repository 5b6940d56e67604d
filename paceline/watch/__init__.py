"""The live view of runs: what their files say now, followed as they grow. Only the watchdog writes
into a run directory: it may request a stop.

    files of a run --RunReader--> RunView --+--> cli/watch_screen.py   a terminal
    runs/, sweeps  --find_runs--> many      +--> page.py               a page, live
                                            +--> watchdog.py           .anomaly_type and .HALT
"""
