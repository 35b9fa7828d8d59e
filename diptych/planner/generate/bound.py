"""A lower bound of the makespan of any schedule of a pipeline."""

from diptych.planner.generate.orders import Pipeline


def lower_bound(pipeline: Pipeline) -> float:
    """Return the largest of these lower bounds, over all ranks r.

    single microbatch: all F and I, the messages between ranks, and the W that ends last.
    lead_in + FI + max(W, lead_out): the computation of r, and what cannot overlap with it.
    area / limit, after lead_in: bytes saved for backward times the time they are saved.

    FI and W are times of r's actions of all microbatches. lead_out begins at the end of r's last I: from there the last
    microbatch has to reach stage 0 and end with its W. lead_in is the time until r's first F. If it is longer,
    lead_in is the time until r's first I, minus the forwards that fit into r's memory before it.
    """
    p = pipeline
    heads, backs, last_end = p.single_microbatch_times()
    bounds = [max(backs[s] + p.whole[s] for s in range(p.num_stages))]
    for rank, own in enumerate(p.own):
        first = own[0]
        limit = p.memory_limits[rank]
        passes = p.m * sum(p.forward[s] + p.inputs[s] for s in own)
        weights = p.m * sum(p.weights[s] for s in own)
        lead_in = max(heads[first], min(backs[s] for s in own) - _most_forwards(p, rank))
        lead_out = last_end - backs[first] - p.inputs[first] + p.weights[0]
        bounds.append(lead_in + passes + max(weights, lead_out))
        if 0.0 < limit < float("inf"):
            area = sum(
                p.saved[s] * (backs[s] + p.inputs[s] - heads[s]) + min(p.saved[s], p.pending[s]) * p.weights[s]
                for s in own
            )
            bounds.append(heads[first] + p.m * area / limit)
    return max(bounds)


def _most_forwards(p: Pipeline, rank: int) -> float:
    """Return the time of the forwards, counted fractionally, that a rank has memory for before its first backward."""
    time = 0.0
    left = p.memory_limits[rank]
    for stage in sorted(p.own[rank], key=lambda s: p.saved[s] / p.forward[s] if p.forward[s] else float("inf")):
        count = min(float(p.m), left / p.saved[stage]) if p.saved[stage] else float(p.m)
        time += count * p.forward[stage]
        left -= count * p.saved[stage]
    return time
