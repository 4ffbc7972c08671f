"""What a tuning found: tables, plots, importance of parameters, the best command line."""
