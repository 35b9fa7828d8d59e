"""Adversarial fuzzers, one per technique: random user programs, compared with the plain program."""
