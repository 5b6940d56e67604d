"""`paceline drill`: plants a fault in a user's own job, and shows whether it is named."""
