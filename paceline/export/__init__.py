"""A run's model in the files that other programs load: written, loaded again, compared."""
