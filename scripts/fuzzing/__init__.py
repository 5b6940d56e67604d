"""What scripts/fuzz is made of: mutate, watch, ground, and the kinds of input (asked, kept)."""
