"""The grammars, one module per technique; each implements tests.fuzz.harness.Fuzzer."""
