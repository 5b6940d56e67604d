"""Models as plain torch modules: no ranks, no process groups, no config loading."""
