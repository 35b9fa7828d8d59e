/* The figures, the choice of schedules, and the tables around the timeline. */

/** Fill a table: headings with a class, and rows of texts. */
function fill(table, headings, rows, marked = -1) {
  const cell = (name, text, place) => h(name, { class: headings[place][1], scope: name === "th" ? "col" : null }, text);
  table.replaceChildren(
    h("thead", {}, h("tr", {}, ...headings.map(([text], place) => cell("th", text, place)))),
    h("tbody", {}, ...rows.map((row, place) => h("tr", { class: place === marked ? "most" : null }, ...row.map((text, at) => cell("td", text, at))))),
  );
}

function showWords(data) {
  find("title").textContent = data.title;
  find("words").replaceChildren(...data.words.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

/** Show the main figures of the step. */
function showFigures(simulation, data) {
  const largest = mostRank(simulation);
  const busy = sum(simulation.ranks.map((rank) => simulation.makespan - rank.idle));
  const replayed = simulation.microbatches * sum(simulation.stages.map((stage) => stage.recomputed));
  const figure = (id, name, value, note) => h("div", {}, h("dt", {}, name), h("dd", { id }, value, h("small", {}, note)));
  const after = simulation.gradients + simulation.update;
  find("figures").replaceChildren(
    figure("makespan", "First forward to last backward", time(simulation.makespan), `and ${time(after)} for gradients and update`),
    figure("idle", "Bubble", share(simulation.idle), "idle share of all ranks' time"),
    figure("peak", "Peak memory", memory(simulation.ranks[largest].memory.total, data.memoryUnit), `on rank ${largest}`),
    figure("replayed", "Recompute", share(replayed / busy), replayed > 0 ? "of the ranks' busy time" : "no recompute"),
  );
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function mostRank(simulation) {
  const totals = simulation.ranks.map((rank) => rank.memory.total);
  return totals.indexOf(Math.max(...totals));
}

function nameOf(schedule) {
  if (schedule.name === "none") return "none, one rank";
  return schedule.virtual > 1 ? `${schedule.name}, v=${schedule.virtual}` : schedule.name;
}

/** Show a bar for each schedule; call choose with the index of a chosen one. */
function showSchedules(data, choose) {
  find("compare").hidden = data.schedules.length < 2 && data.refused.length === 0;
  find("choose").hidden = data.schedules.length < 2;
  find("schedule").replaceChildren(...data.schedules.map((schedule, at) => h("option", { value: at }, nameOf(schedule))));
  find("schedule").addEventListener("change", (event) => choose(Number(event.target.value)));
  const longest = Math.max(...data.schedules.filter((each) => each.name !== "none" || data.schedules.length === 1).map((each) => each.makespan));
  find("schedules").replaceChildren(...data.schedules.map((schedule, at) => {
    const radio = h("input", { type: "radio", name: "schedule", value: at });
    radio.addEventListener("change", () => choose(at));
    const whole = Math.min(1, schedule.makespan / longest);
    const part = (name, width) => h("span", { class: name, style: `width:${(100 * whole * width).toFixed(3)}%` });
    const total = Math.max(...schedule.ranks.map((rank) => rank.memory.total));
    return h("label", { "data-name": schedule.name }, radio, h("span", {}, nameOf(schedule)),
      h("span", { class: "long", "aria-hidden": "true" }, part("busy", 1 - schedule.idle), part("idle", schedule.idle)),
      h("span", { class: "value" }, time(schedule.makespan)),
      h("span", { class: "value" }, `${share(schedule.idle)} bubble`),
      h("span", { class: "value bytes" }, memory(total, data.memoryUnit)));
  }));
  const { limits, refused } = data;
  const words = refused.map(({ name, reason }) => h("p", {}, `${name} does not fit: ${reason}`));
  if (limits.pieces > limits.withOthers && data.schedules[0].ranksCount > 1) {
    find("compare").hidden = false;
    words.push(h("p", {}, `Only the chosen schedule is drawn: ${limits.pieces.toLocaleString("en-US")} stages times microbatches exceed the ${limits.withOthers.toLocaleString("en-US")} up to which other schedules are drawn. diptych plan prints all of them.`));
  }
  if (data.schedules.some((each) => each.name === "none") && data.schedules.length > 1) {
    words.push(h("p", {}, "none runs the whole model on one rank; its bar is cut at the longest of the others."));
  }
  find("refused").replaceChildren(...words);
}

function showRanks(simulation, data) {
  const size = (amount) => inUnit(amount, data.memoryUnit);
  const all = [
    ["parameters", "parameters"], ["gradients", "gradients"], ["moments", "moments"], ["saved for backward", "activations"],
    ["from I to W", "waiting"], ["total", "total"], ["also on host", "on_host"],
  ];
  const terms = all.filter(([, key]) => !["waiting", "on_host"].includes(key) || simulation.ranks.some((rank) => rank.memory[key] > 0));
  fill(find("ranks"),
    [["rank"], ["bubble"], ["in flight"], ...terms.map(([text]) => [text]), ["without recompute"]],
    simulation.ranks.map((rank, place) => [
      String(place), share(rank.idle / simulation.makespan), String(rank.inFlight), ...terms.map(([, key]) => size(rank.memory[key])), size(rank.totalWithout),
    ]), mostRank(simulation));
  find("bytes-words").textContent = `In ${data.memoryUnit.name}. Parameters, gradients and AdamW's two moments are resident during the whole step. In flight: microbatches, per stage, whose backward has not ended. The last column is the total without recompute.`;
}

function showStages(simulation, data) {
  const split = simulation.stages.some((stage) => stage.waiting > 0);
  fill(find("stages"),
    [["stage"], ["rank"], ["holds", "words"], ["F"], ["I"], ["W"], ["recompute in I"], ["saved per microbatch"], ...(split ? [["waits for W"]] : [])],
    simulation.stages.map((stage, at) => [
      String(at), String(stage.rank), stage.holds, time(stage.F), time(stage.I), time(stage.W), time(stage.recomputed),
      memory(stage.saved, data.memoryUnit), ...(split ? [memory(stage.waiting, data.memoryUnit)] : []),
    ]));
}

/** Show the cost and the saving of recompute; consecutive equal stages are joined. */
function showAgain(simulation, data) {
  if (!simulation.stages.some((stage) => stage.recomputed > 0)) {
    find("again").replaceChildren(h("p", {}, "Recompute is off. --recompute-granularity enables it."));
    return;
  }
  const runs = [];
  simulation.stages.forEach((stage, at) => {
    const last = runs[runs.length - 1];
    const isEqual = last && ["saved", "savedWithout", "recomputed"].every((key) => last.stage[key] === stage[key]);
    if (isEqual) {
      last.to = at;
      last.again.push(stage.again);
    } else runs.push({ from: at, to: at, stage, again: [stage.again] });
  });
  find("again").replaceChildren(...runs.map(({ from, to, stage, again: words }) => {
    const again = words.join("; ");
    const name = from === to ? `Stage ${from}` : `Stages ${from} to ${to}, each`;
    const whole = stage.F + stage.I + stage.W;
    const saved = stage.savedWithout > 0 ? 1 - stage.saved / stage.savedWithout : 0;
    return h("p", {}, `${name}: ${again}. A microbatch saves ${memory(stage.saved, data.memoryUnit)} instead of ${memory(stage.savedWithout, data.memoryUnit)} (${share(saved)} less); recompute takes ${time(stage.recomputed)} of its ${time(whole)} on the stage.`);
  }), h("p", {}, "In the timeline recompute is hatched. It is drawn at the start of a backward, although each layer or block is replayed just before its own backward."));
}

function showOffload(simulation, data) {
  const { copies } = simulation;
  find("offload").hidden = !copies;
  find("copies-choice").hidden = !copies;
  if (!copies) return;
  const words = [];
  const table = find("offload-table");
  table.replaceChildren();
  if (copies.leftOut) words.push(`Not drawn: ${copies.leftOut} exceed the limit.`);
  if (copies.parameters) {
    const hides = copies.tokens >= copies.hidingTokens;
    words.push(`Layers' parameters are stored on the host and fetched for each use, ${count(copies.ahead, "layer")} ahead. A layer's copy overlaps fully with its forward from ${Math.ceil(copies.hidingTokens).toLocaleString("en-US")} tokens per microbatch; with ${copies.tokens.toLocaleString("en-US")} it ${hides ? "does" : "does not"}.`);
    words.push("The timeline does not wait for copies. A copy is drawn from the time at which it is requested and the link is free. Late copies, in another colour, end after the use that needs them has started. The last column, alone, is the predicted step of the rank's computation and copies without a pipeline, from matrix products only.");
    if (!copies.leftOut) {
      fill(table, [["rank"], ["copies"], ["late"], ["to device"], ["to host"], ["on device at once"], ["link busy"], ["computation"], ["waiting"], ["alone"]],
        copies.ranks.map((rank, at) => [
          String(at), String(rank.count), String(rank.lateCount), bytes(rank.bytesIn), bytes(rank.bytesOut), bytes(rank.peak),
          time(rank.transfer), time(rank.compute), time(rank.waited), time(rank.alone),
        ]));
      const cut = sum(copies.ranks.map((rank) => rank.count - rank.begin.length));
      if (cut > 0) words.push(`Not drawn: ${cut.toLocaleString("en-US")} copies that start after the end of the step.`);
    }
  }
  if (copies.activations) words.push("Activations saved for backward move to the host (arrow down) and are requested again before their backward (arrow up). These arrows have no length. Memory is drawn without the values on the host; those of a stage's last layers are drawn as if they stayed on the device.");
  words.push("Copies are those of PyTorch; in a pipeline, JAX's copies do not extend from one action into the next.");
  find("offload-words").replaceChildren(...words.map((text) => h("p", {}, text)));
}

function showLimits(data) {
  const equalRanks = data.replicas * data.contextRanks;
  const words = [
    "Times are seconds of a roofline: each operation takes the longer of its products at the device's rate and its reads and writes at the memory's bandwidth. diptych plan prints the same times. Measured steps on a CPU take 1.0 to 2.0 times as long in PyTorch and 1.4 to 4.3 times in JAX (docs/planner.md); they have not been measured on a GPU. Launch overhead, contention of messages and other load of the machine are not modelled.",
    "Memory is what a rank holds between actions, as diptych plan prints it; temporary buffers, messages in transit and flattened gradients are left out. Gradients are counted in full from the start of the step.",
  ];
  if (equalRanks > 1) words.push(`A row stands for ${count(equalRanks, "rank")}: ${count(data.replicas, "replica")} of ${count(data.contextRanks, "context rank")}, which run the same actions. Exchanges between context ranks are part of F and I; the sum of gradients follows the last backward.`);
  find("limits").replaceChildren(...words.map((text) => h("p", {}, text)));
}

function showLegend(simulation) {
  const swatch = (...shapes) => svg("svg", { width: 16, height: 12, "aria-hidden": "true" }, ...shapes);
  const square = (name) => swatch(svg("rect", { class: name, width: 16, height: 12, rx: 2 }));
  const kinds = Object.keys(KINDS).filter((kind) => simulation.kind.includes(kind));
  const entries = kinds.map((kind) => [square(kind), `${kind} ${KINDS[kind]}`]);
  if (simulation.stages.some((stage) => stage.recomputed > 0)) {
    entries.push([swatch(svg("rect", { class: "B", width: 16, height: 12, rx: 2 }), svg("path", { class: "hatch-line", d: "M3 12L11 0M9 12L16 2" })), "recompute"]);
  }
  entries.push([square("track"), "bubble"]);
  for (const name of ["parameters", "gradients", "moments"]) entries.push([square(name), name]);
  entries.push([square("saved"), "saved for backward"]);
  if (simulation.stages.some((stage) => stage.waiting > 0)) entries.push([square("waiting"), "waits for W"]);
  if (simulation.copies?.parameters) entries.push([square("copy"), "copy to the device"], [square("copy late"), "late copy"], [square("copy out"), "copy to the host"]);
  if (simulation.copies?.activations) entries.push([swatch(svg("path", { class: "mark", d: "M5 1V10M2 7L5 10L8 7" })), "activations to host (down), back to device (up)"]);
  if (simulation.gradients + simulation.update > 0) entries.push([square("after-update"), "sum of gradients, update"]);
  if (simulation.virtual > 1) entries.push([swatch(), "later stages of a rank are lighter"]);
  find("legend").replaceChildren(...entries.map(([shape, text]) => h("li", {}, shape, text)));
}
