"""The model: layers, parameters, data, random numbers, and what its operations accept."""
