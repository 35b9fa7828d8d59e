"""All pairs and their bugs."""

from benchmarks.mutations.attention import ROTARY, ROTARY_BUGS
from benchmarks.mutations.cases import Bug, Case
from benchmarks.mutations.experts import MOE, MOE_BUGS
from benchmarks.mutations.norms import NORM_BUGS, NORMS
from benchmarks.mutations.project import DELTA_BUGS, DELTA_RULE, HYPER_BUGS, HYPER_CONNECTIONS
from benchmarks.mutations.recurrent import LSTM, LSTM_BUGS
from benchmarks.mutations.third_party import ENCODER, ENCODER_BUGS, RNN, RNN_BUGS
from benchmarks.mutations.vision import VIT, VIT_BUGS

CASES: dict[str, tuple[Case, list[Bug]]] = {
    case.name: (case, bugs)
    for case, bugs in (
        (HYPER_CONNECTIONS, HYPER_BUGS),
        (DELTA_RULE, DELTA_BUGS),
        (VIT, VIT_BUGS),
        (LSTM, LSTM_BUGS),
        (ROTARY, ROTARY_BUGS),
        (MOE, MOE_BUGS),
        (NORMS, NORM_BUGS),
        (ENCODER, ENCODER_BUGS),
        (RNN, RNN_BUGS),
    )
}
"""Pairs with their bugs, by name."""
