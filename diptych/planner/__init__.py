"""Prediction of memory, time and traffic, search of configurations, and their reports. No backend imports it."""
