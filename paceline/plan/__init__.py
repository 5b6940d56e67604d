"""Deciding: config (asked) + env (found) -> plan, with every reason and every problem."""
