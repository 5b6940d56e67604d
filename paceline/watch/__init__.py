"""The live view of runs: what their files say now, followed as they grow. Nothing here writes into
a run directory but the watchdog, which may ask for a stop.

    files of a run --RunReader--> RunView --+--> cli/watch_screen.py   a terminal
    runs/, sweeps  --find_runs--> many      +--> page.py               a page, live
                                            +--> watchdog.py           .anomaly_type and .HALT
"""
