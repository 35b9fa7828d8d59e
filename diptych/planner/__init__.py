"""Predictions of memory, time and traffic, the search of configurations, and their reports. No backend imports it."""
