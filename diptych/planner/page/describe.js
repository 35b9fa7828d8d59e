/* Sentences that describe actions. */

const NOUNS = { F: "Forward", B: "Backward", I: "Input gradient", W: "Weight gradient" };

/** Return a description of the layers of a stage. */
const holds = (simulation, stage) => simulation.stages[stage].holds;

/** Return a short name: 2F5 is stage 2, forward, microbatch 5. */
const short = (simulation, id) => `${simulation.stage[id]}${simulation.kind[id]}${simulation.microbatch[id]}`;

const between = (simulation, id) => `${clock(simulation.start[id], simulation.total)} to ${clock(simulation.end[id], simulation.total)}`;

function where(simulation, id) {
  const stages = simulation.stages.length > 1 ? ` on stage ${simulation.stage[id]} (${holds(simulation, simulation.stage[id])})` : "";
  return `${NOUNS[simulation.kind[id]]} of microbatch ${simulation.microbatch[id]}${stages}, rank ${simulation.rank[id]}`;
}

/** Describe what an action waited for, and how long. */
function waiting(simulation, id) {
  const idle = idleBefore(simulation, id);
  const before = simulation.before(id);
  const last = simulation.input[id];
  const away = last >= 0 && simulation.rank[last] !== simulation.rank[id];
  if (idle > 1e-9 * simulation.total && last >= 0) {
    const from = away ? ` from rank ${simulation.rank[last]}` : "";
    const wire = away && simulation.wire > 0 ? `, which ended at ${clock(simulation.end[last], simulation.total)} and took ${time(simulation.wire)} to arrive` : "";
    return `The rank was idle for ${time(idle)}: it waited for ${short(simulation, last)}${from}${wire}.`;
  }
  if (before < 0) return "It is the first action of its rank and does not wait.";
  const busy = `It started when its rank had finished ${short(simulation, before)}`;
  if (last < 0 || last === before) return `${busy}${last === before ? ", its input" : ""}.`;
  const early = simulation.start[id] - simulation.ready(id);
  return early > 1e-9 * simulation.total
    ? `${busy}; its last input, ${short(simulation, last)}, had arrived ${time(early)} earlier.`
    : `${busy}; its last input, ${short(simulation, last)}, arrived then.`;
}

/** Describe the part of a backward that is recompute. */
function again(simulation, id) {
  const stage = simulation.stages[simulation.stage[id]];
  if (!(simulation.kind[id] === "B" || simulation.kind[id] === "I") || !(stage.recomputed > 0)) return "";
  return `${time(stage.recomputed)} of it is recompute: ${stage.again}.`;
}

/** Describe a cell, for its tooltip. */
function facts(simulation, id) {
  const stage = simulation.stages[simulation.stage[id]];
  const exchanged = simulation.kind[id] !== "W" && stage.exchanged > 0
    ? `Context ranks exchange for ${time(stage.exchanged)} in forward and backward.` : "";
  return [
    `${where(simulation, id)}: ${between(simulation, id)}, ${time(simulation.lasts(id))}.`,
    waiting(simulation, id), again(simulation, id), exchanged,
  ].filter(Boolean).join(" ");
}

/** Describe a step of the followed microbatch: its input, computation, saved bytes and result. */
function story(simulation, id, data) {
  const stage = simulation.stages[simulation.stage[id]];
  const sentences = [`${where(simulation, id)}, ${between(simulation, id)}.`, comes(simulation, id, data)];
  if (idleBefore(simulation, id) > 1e-9 * simulation.total) sentences.push(`The rank had been idle for ${time(idleBefore(simulation, id))}.`);
  sentences.push(again(simulation, id));
  const size = (amount) => memory(amount, data.memoryUnit);
  if (simulation.kind[id] === "F") sentences.push(`It saves ${size(stage.saved)} for backward.`);
  if (simulation.kind[id] === "B") sentences.push(`It frees the ${size(stage.saved)} that forward saved.`);
  if (simulation.kind[id] === "I") {
    sentences.push(`It frees the ${size(stage.saved)} that forward saved; ${size(stage.waiting)}, the inputs of linear layers and the gradients of their outputs, wait for W.`);
  }
  if (simulation.kind[id] === "W") {
    const since = simulation.start[id] - simulation.end[simulation.backward(id)];
    sentences.push(since > 0 ? `It starts ${time(since)} after its I, and frees the ${size(stage.waiting)} that waited.`
      : `It follows its I at once, and frees the ${size(stage.waiting)} that waited.`);
  }
  sentences.push(goes(simulation, id, data));
  return sentences.filter(Boolean).join(" ");
}

function comes(simulation, id, data) {
  if (simulation.kind[id] === "W") return "It computes gradients of weights, for which no other rank waits, so it can fill the bubble.";
  const other = simulation.sender(id);
  const what = simulation.kind[id] === "F" ? "activations" : "gradients";
  if (other === undefined) return simulation.kind[id] === "F" ? "It reads the microbatch's tokens." : "It starts at the loss.";
  if (simulation.rank[other] === simulation.rank[id]) return `It reads the ${what} of stage ${simulation.stage[other]}, which is placed on the same rank: no message is sent.`;
  const arrived = simulation.end[other] + simulation.wire;
  return `It receives ${bytes(data.message)} of ${what} from stage ${simulation.stage[other]} on rank ${simulation.rank[other]}, arriving at ${clock(arrived, simulation.total)}.`;
}

function goes(simulation, id, data) {
  if (simulation.kind[id] === "W") return "";
  const other = simulation.receiver(id);
  if (other === undefined) return simulation.kind[id] === "F" ? "The loss of the microbatch is known." : "It is the first stage: no message is sent.";
  if (simulation.rank[other] === simulation.rank[id]) return `The next stage, ${simulation.stage[other]}, is placed on the same rank.`;
  const what = simulation.kind[id] === "F" ? "Its result" : "The gradient of its input";
  const wire = simulation.wire > 0 ? `, which takes ${time(simulation.wire)}` : "";
  return `${what}, ${bytes(data.message)}, goes to stage ${simulation.stage[other]} on rank ${simulation.rank[other]}${wire}.`;
}
