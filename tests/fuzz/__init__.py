"""Adversarial fuzzers, one a technique: random programs of what users write, held against the plain program."""
