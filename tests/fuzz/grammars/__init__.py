"""The grammars: one module a technique, each a tests.fuzz.harness.Fuzzer."""
