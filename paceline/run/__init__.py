"""One run from words to report: flow calls the stages in order; read it first."""
