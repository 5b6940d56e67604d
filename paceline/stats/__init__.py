"""Figures from recorded steps. No torch: it reads files of runs made anywhere."""
