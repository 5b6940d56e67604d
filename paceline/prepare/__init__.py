"""Turn what a user has into what training reads, once: one file per kind of data."""
