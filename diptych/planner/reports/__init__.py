"""Reports of plans on the terminal and as pictures."""
