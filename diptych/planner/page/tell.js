/* Actions in sentences. */

const NOUNS = { F: "Forward", B: "Backward", I: "Input gradient", W: "Weight gradient" };

/** Layers of a stage, from its own words: what it holds. */
const holds = (course, stage) => course.stages[stage].holds;

/** 2F5: stage 2, forward, microbatch 5. */
const short = (course, id) => `${course.stage[id]}${course.kind[id]}${course.microbatch[id]}`;

const between = (course, id) => `${clock(course.start[id], course.total)} to ${clock(course.end[id], course.total)}`;

function where(course, id) {
  const stages = course.stages.length > 1 ? ` on stage ${course.stage[id]} (${holds(course, course.stage[id])})` : "";
  return `${NOUNS[course.kind[id]]} of microbatch ${course.microbatch[id]}${stages}, rank ${course.rank[id]}`;
}

/** What an action waited for, and how long. */
function waiting(course, id) {
  const idle = idleBefore(course, id);
  const before = course.before(id);
  const last = course.input[id];
  const away = last >= 0 && course.rank[last] !== course.rank[id];
  if (idle > 1e-9 * course.total && last >= 0) {
    const from = away ? ` from rank ${course.rank[last]}` : "";
    const wire = away && course.wire > 0 ? `, which ended at ${clock(course.end[last], course.total)} and was ${time(course.wire)} on its way` : "";
    return `The rank was idle for ${time(idle)}: it waited for ${short(course, last)}${from}${wire}.`;
  }
  if (before < 0) return "It is the first on its rank and waits for nothing.";
  const busy = `It began when its rank had ended ${short(course, before)}`;
  if (last < 0 || last === before) return `${busy}${last === before ? ", which it needs" : ""}.`;
  const early = course.start[id] - course.ready(id);
  return early > 1e-9 * course.total
    ? `${busy}; what it needs last, ${short(course, last)}, had been there for ${time(early)}.`
    : `${busy}; what it needs last, ${short(course, last)}, came then.`;
}

/** The part of a backward that computes again what forward dropped. */
function again(course, id) {
  const stage = course.stages[course.stage[id]];
  if (!(course.kind[id] === "B" || course.kind[id] === "I") || !(stage.recomputed > 0)) return "";
  return `${time(stage.recomputed)} of it is computing again: ${stage.again}.`;
}

/** A cell, for whoever points at it. */
function facts(course, id) {
  const stage = course.stages[course.stage[id]];
  const exchanged = course.kind[id] !== "W" && stage.exchanged > 0
    ? `Ranks that share its sequences exchange for ${time(stage.exchanged)} in forward and backward.` : "";
  return [
    `${where(course, id)}: ${between(course, id)}, ${time(course.lasts(id))}.`,
    waiting(course, id), again(course, id), exchanged,
  ].filter(Boolean).join(" ");
}

/** A step of the microbatch that is followed: what comes, what is done, what is kept, what goes. */
function story(course, id, data) {
  const stage = course.stages[course.stage[id]];
  const told = [`${where(course, id)}, ${between(course, id)}.`, comes(course, id, data)];
  if (idleBefore(course, id) > 1e-9 * course.total) told.push(`The rank had been idle for ${time(idleBefore(course, id))}.`);
  told.push(again(course, id));
  const size = (amount) => memory(amount, data.memoryUnit);
  if (course.kind[id] === "F") told.push(`It keeps ${size(stage.saved)} for the backward.`);
  if (course.kind[id] === "B") told.push(`It frees the ${size(stage.saved)} that forward kept.`);
  if (course.kind[id] === "I") {
    told.push(`It lets go of the ${size(stage.saved)} that forward kept; ${size(stage.waiting)}, what linear maps read and the gradients of what they gave, wait for W.`);
  }
  if (course.kind[id] === "W") {
    const since = course.start[id] - course.end[course.backward(id)];
    told.push(since > 0 ? `It comes ${time(since)} after its I, and frees the ${size(stage.waiting)} that waited.`
      : `It follows its I at once, and frees the ${size(stage.waiting)} that waited.`);
  }
  told.push(goes(course, id, data));
  return told.filter(Boolean).join(" ");
}

function comes(course, id, data) {
  if (course.kind[id] === "W") return "The gradients of weights, for which no other rank waits: they can fill time in which the rank would be idle.";
  const other = course.sender(id);
  const what = course.kind[id] === "F" ? "activations" : "gradients";
  if (other === undefined) return course.kind[id] === "F" ? "It reads the microbatch's tokens." : "It begins at the loss.";
  if (course.rank[other] === course.rank[id]) return `It takes the ${what} of stage ${course.stage[other]}, which lies on the same rank: nothing is sent.`;
  const arrived = course.end[other] + course.wire;
  return `It takes the ${bytes(data.message)} of ${what} from stage ${course.stage[other]} on rank ${course.rank[other]}, there at ${clock(arrived, course.total)}.`;
}

function goes(course, id, data) {
  if (course.kind[id] === "W") return "";
  const other = course.receiver(id);
  if (other === undefined) return course.kind[id] === "F" ? "The loss of the microbatch is known." : "There is no stage before it: nothing is sent.";
  if (course.rank[other] === course.rank[id]) return `The next stage, ${course.stage[other]}, lies on the same rank.`;
  const what = course.kind[id] === "F" ? "Its result" : "The gradient of its input";
  const wire = course.wire > 0 ? `, ${time(course.wire)} on the way` : "";
  return `${what}, ${bytes(data.message)}, goes to stage ${course.stage[other]} on rank ${course.rank[other]}${wire}.`;
}
