"""Pipeline schedules as plain data: drawn, simulated, checked by formulas, compared. No torch."""
