"""`paceline drill`: plants a fault in a user's own job, and shows what is said of it."""
