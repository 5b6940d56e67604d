"""One run from words to report: flow calls the stages in order, resume goes on, conclude ends."""
