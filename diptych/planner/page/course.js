/* What follows from a schedule's columns: when actions end, what they wait for, whom they hand on to. */

/** A schedule with everything that is asked of it often. Actions are numbers, as in its columns. */
function courseOf(schedule) {
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
    kept: schedule.actions.kept,
    waiting: schedule.actions.waiting,
    total: schedule.makespan + schedule.gradients + schedule.update,
    size: rank.length,
    /** The rank's action before this one, or -1. */
    before: (id) => (id > first[rank[id]] ? id - 1 : -1),
    /** When the last of what it needs has arrived. */
    ready: (id) => (input[id] < 0 ? 0 : end[input[id]] + (rank[input[id]] === rank[id] ? 0 : schedule.wire)),
    /** The action that its result is for, or undefined. */
    receiver: (id) => {
      if (kind[id] === "W") return undefined;
      const [table, step] = kind[id] === "F" ? [forwards, 1] : [backwards, -1];
      const other = stage[id] + step;
      return other < 0 || other >= stages.length ? undefined : table.get(key(other, microbatch[id]));
    },
    /** The action whose result it takes from another stage, or undefined. */
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

/** How long a rank had nothing to do before an action. */
function idleBefore(course, id) {
  const before = course.before(id);
  return Math.max(0, course.start[id] - (before < 0 ? 0 : course.end[before]));
}

/** What a rank keeps for backward at a time: bytes kept, and bytes that wait for W. */
function keptAt(course, rank, seconds) {
  let low = course.first[rank];
  let high = course.first[rank + 1];
  const happens = (id) => (course.kind[id] === "F" ? course.start[id] : course.end[id]);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (happens(middle) <= seconds) low = middle + 1;
    else high = middle;
  }
  return low === course.first[rank] ? [0, 0] : [course.kept[low - 1], course.waiting[low - 1]];
}

/** The action of a rank that runs at a time, or the nearest one. */
function actionAt(course, rank, seconds) {
  let best = course.first[rank];
  let least = Infinity;
  for (let id = course.first[rank]; id < course.first[rank + 1]; id++) {
    const away = Math.max(course.start[id] - seconds, seconds - course.end[id], 0);
    if (away < least) [best, least] = [id, away];
  }
  return best;
}
