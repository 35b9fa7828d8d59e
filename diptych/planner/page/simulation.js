/* Derived data of a schedule: ends of actions, their dependencies, and the receivers of their results. */

/** Return a schedule with its derived data. Actions are numbered as in its columns. */
function simulationOf(schedule) {
  const { rank, kind, stage, microbatch, start, input } = schedule.actions;
  const stages = schedule.stages;
  const lasts = (id) => {
    const times = stages[stage[id]];
    return kind[id] === "B" ? times.I + times.W : times[kind[id]];
  };
  const end = start.map((begin, id) => begin + lasts(id));
  const first = [0];
  for (let id = 1; id <= rank.length; id++) if (id === rank.length || rank[id] !== rank[id - 1]) first.push(id);
  const forwards = new Map();
  const backwards = new Map();
  const byMicrobatch = Array.from({ length: schedule.microbatches }, () => []);
  const key = (s, m) => s * schedule.microbatches + m;
  for (let id = 0; id < rank.length; id++) {
    byMicrobatch[microbatch[id]].push(id);
    if (kind[id] === "F") forwards.set(key(stage[id], microbatch[id]), id);
    else if (kind[id] !== "W") backwards.set(key(stage[id], microbatch[id]), id);
  }
  const depth = (id) => {
    const turn = { F: 0, B: 1, I: 1, W: 2 }[kind[id]];
    return turn * stages.length + (turn === 1 ? stages.length - 1 - stage[id] : stage[id]);
  };
  for (const ids of byMicrobatch) ids.sort((a, b) => start[a] - start[b] || depth(a) - depth(b));
  return {
    ...schedule,
    rank, kind, stage, microbatch, start, end, input, lasts, first, byMicrobatch,
    saved: schedule.actions.saved,
    waiting: schedule.actions.waiting,
    total: schedule.makespan + schedule.gradients + schedule.update,
    size: rank.length,
    /** Return the rank's previous action, or -1. */
    before: (id) => (id > first[rank[id]] ? id - 1 : -1),
    /** Return when the last dependency has arrived. */
    ready: (id) => (input[id] < 0 ? 0 : end[input[id]] + (rank[input[id]] === rank[id] ? 0 : schedule.wire)),
    /** Return the action that receives the result, or undefined. */
    receiver: (id) => {
      if (kind[id] === "W") return undefined;
      const [table, step] = kind[id] === "F" ? [forwards, 1] : [backwards, -1];
      const other = stage[id] + step;
      return other < 0 || other >= stages.length ? undefined : table.get(key(other, microbatch[id]));
    },
    /** Return the action of another stage whose result it receives, or undefined. */
    sender: (id) => {
      if (kind[id] === "W") return undefined;
      const [table, step] = kind[id] === "F" ? [forwards, -1] : [backwards, 1];
      const other = stage[id] + step;
      return other < 0 || other >= stages.length ? undefined : table.get(key(other, microbatch[id]));
    },
    forward: (id) => forwards.get(key(stage[id], microbatch[id])),
    backward: (id) => backwards.get(key(stage[id], microbatch[id])),
  };
}

/** Return how long a rank was idle before an action. */
function idleBefore(simulation, id) {
  const before = simulation.before(id);
  return Math.max(0, simulation.start[id] - (before < 0 ? 0 : simulation.end[before]));
}

/** Return the bytes that a rank has saved for backward at a time, and those waiting for W. */
function savedAt(simulation, rank, seconds) {
  let low = simulation.first[rank];
  let high = simulation.first[rank + 1];
  const happens = (id) => (simulation.kind[id] === "F" ? simulation.start[id] : simulation.end[id]);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (happens(middle) <= seconds) low = middle + 1;
    else high = middle;
  }
  return low === simulation.first[rank] ? [0, 0] : [simulation.saved[low - 1], simulation.waiting[low - 1]];
}

/** Return the action of a rank that runs at a time, or the nearest one. */
function actionAt(simulation, rank, seconds) {
  let best = simulation.first[rank];
  let least = Infinity;
  for (let id = simulation.first[rank]; id < simulation.first[rank + 1]; id++) {
    const away = Math.max(simulation.start[id] - seconds, seconds - simulation.end[id], 0);
    if (away < least) [best, least] = [id, away];
  }
  return best;
}
