"""Pipeline schedules: stages, actions, messages, named tables, validation and simulation."""
