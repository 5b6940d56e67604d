"""Pipeline schedules as plain data: drawn, simulated, held against formulas, compared. No torch."""
