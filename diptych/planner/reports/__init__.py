"""Reports of plans: tables for the terminal, and pictures."""
