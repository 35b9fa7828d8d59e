/* What stands around the timeline: the figures, the schedules, and tables. */

/** A table: headings with a class, and rows of texts. */
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

/** The step in a few numbers. */
function showFigures(course, data) {
  const largest = mostRank(course);
  const busy = sum(course.ranks.map((rank) => course.makespan - rank.idle));
  const replayed = course.microbatches * sum(course.stages.map((stage) => stage.recomputed));
  const figure = (id, name, value, note) => h("div", {}, h("dt", {}, name), h("dd", { id }, value, h("small", {}, note)));
  const after = course.gradients + course.update;
  find("figures").replaceChildren(
    figure("makespan", "First forward to last backward", time(course.makespan), `and ${time(after)} for gradients and update`),
    figure("idle", "Ranks are idle", share(course.idle), "the bubble, of all ranks together"),
    figure("peak", "Most memory", memory(course.ranks[largest].memory.total, data.memoryUnit), `on rank ${largest}`),
    figure("replayed", "Computed again", share(replayed / busy), replayed > 0 ? "of the time that ranks work" : "everything is kept"),
  );
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function mostRank(course) {
  const totals = course.ranks.map((rank) => rank.memory.total);
  return totals.indexOf(Math.max(...totals));
}

function nameOf(schedule) {
  if (schedule.name === "none") return "none, one rank";
  return schedule.virtual > 1 ? `${schedule.name}, v=${schedule.virtual}` : schedule.name;
}

/** A bar for each schedule; choosing one is told to the caller. */
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
      h("span", { class: "value" }, `${share(schedule.idle)} idle`),
      h("span", { class: "value bytes" }, memory(total, data.memoryUnit)));
  }));
  const { limits, refused } = data;
  const words = refused.map(({ name, reason }) => h("p", {}, `${name} does not fit: ${reason}`));
  if (limits.pieces > limits.withOthers && data.schedules[0].ranksCount > 1) {
    find("compare").hidden = false;
    words.push(h("p", {}, `Drawn is the chosen schedule alone: ${limits.pieces.toLocaleString("en-US")} stages times microbatches are more than the ${limits.withOthers.toLocaleString("en-US")} up to which others are drawn beside it. diptych plan prints them all.`));
  }
  if (data.schedules.some((each) => each.name === "none") && data.schedules.length > 1) {
    words.push(h("p", {}, "none has the whole model on one rank; where its bar would be longer than all others', it is cut."));
  }
  find("refused").replaceChildren(...words);
}

function showRanks(course, data) {
  const size = (amount) => inUnit(amount, data.memoryUnit);
  const all = [
    ["parameters", "parameters"], ["gradients", "gradients"], ["moments", "moments"], ["kept for backward", "activations"],
    ["from I to W", "waiting"], ["total", "total"], ["beside, on host", "on_host"],
  ];
  const shown = all.filter(([, key]) => !["waiting", "on_host"].includes(key) || course.ranks.some((rank) => rank.memory[key] > 0));
  fill(find("ranks"),
    [["rank"], ["idle"], ["in flight"], ...shown.map(([text]) => [text]), ["without recomputing"]],
    course.ranks.map((rank, place) => [
      String(place), share(rank.idle / course.makespan), String(rank.inFlight), ...shown.map(([, key]) => size(rank.memory[key])), size(rank.totalWithout),
    ]), mostRank(course));
  find("bytes-words").textContent = `In ${data.memoryUnit.name}. Parameters, gradients and AdamW's two moments are there all the time; in flight are microbatches, times stages, whose backward is not over. The last column is the total if nothing were computed again.`;
}

function showStages(course, data) {
  const split = course.stages.some((stage) => stage.waiting > 0);
  fill(find("stages"),
    [["stage"], ["rank"], ["holds", "words"], ["F"], ["I"], ["W"], ["of I again"], ["kept, a microbatch"], ...(split ? [["waits for W"]] : [])],
    course.stages.map((stage, at) => [
      String(at), String(stage.rank), stage.holds, time(stage.F), time(stage.I), time(stage.W), time(stage.recomputed),
      memory(stage.saved, data.memoryUnit), ...(split ? [memory(stage.waiting, data.memoryUnit)] : []),
    ]));
}

/** What recomputing costs and saves, by runs of stages that are alike. */
function showAgain(course, data) {
  if (!course.stages.some((stage) => stage.recomputed > 0)) {
    find("again").replaceChildren(h("p", {}, "Nothing: all that backward reads is kept. --recompute-granularity says what to drop instead."));
    return;
  }
  const runs = [];
  course.stages.forEach((stage, at) => {
    const last = runs[runs.length - 1];
    const alike = last && ["saved", "savedWithout", "recomputed"].every((key) => last.stage[key] === stage[key]);
    if (alike) {
      last.to = at;
      last.again.push(stage.again);
    } else runs.push({ from: at, to: at, stage, again: [stage.again] });
  });
  find("again").replaceChildren(...runs.map(({ from, to, stage, again: words }) => {
    const again = words.join("; ");
    const name = from === to ? `Stage ${from}` : `Stages ${from} to ${to}, each`;
    const whole = stage.F + stage.I + stage.W;
    const saved = stage.savedWithout > 0 ? 1 - stage.saved / stage.savedWithout : 0;
    return h("p", {}, `${name}: ${again}. A microbatch keeps ${memory(stage.saved, data.memoryUnit)} rather than ${memory(stage.savedWithout, data.memoryUnit)} (${share(saved)} less); computing again takes ${time(stage.recomputed)} of its ${time(whole)} there.`);
  }), h("p", {}, "In the timeline this part is hatched. It is drawn at the beginning of a backward; in truth each layer or block is computed again just before its own backward."));
}

function showOffload(course, data) {
  const { copies } = course;
  find("offload").hidden = !copies;
  find("copies-choice").hidden = !copies;
  if (!copies) return;
  const words = [];
  const table = find("offload-table");
  table.replaceChildren();
  if (copies.leftOut) words.push(`Not drawn: ${copies.leftOut} are too many.`);
  if (copies.parameters) {
    const hides = copies.tokens >= copies.hidingTokens;
    words.push(`Layers' parameters lie on the host and come for each use, ${count(copies.ahead, "layer")} ahead. A layer's copy hides behind its forward from ${Math.ceil(copies.hidingTokens).toLocaleString("en-US")} tokens a microbatch on; here are ${copies.tokens.toLocaleString("en-US")}: it ${hides ? "is hidden" : "is not hidden"}.`);
    words.push("The timeline does not wait for copies: its times have none, and a cell stays where the schedule has it. A copy is drawn from when it is asked for and the link is free; late ones, in another colour, arrive after the use they are for has begun. Alone, the last column, is the planner's step of that rank's computing and copying without a pipeline, by products alone.");
    if (!copies.leftOut) {
      fill(table, [["rank"], ["copies"], ["late"], ["to device"], ["to host"], ["on device at once"], ["link busy"], ["computing"], ["waits"], ["alone"]],
        copies.ranks.map((rank, at) => [
          String(at), String(rank.count), String(rank.lateCount), bytes(rank.bytesIn), bytes(rank.bytesOut), bytes(rank.peak),
          time(rank.transfer), time(rank.compute), time(rank.waited), time(rank.alone),
        ]));
      const cut = sum(copies.ranks.map((rank) => rank.count - rank.begin.length));
      if (cut > 0) words.push(`Not drawn: ${cut.toLocaleString("en-US")} that the link begins when the step has ended, or later.`);
    }
  }
  if (copies.activations) words.push("What layers keep for backward leaves for the host (arrow down) and is asked for again before its backward (arrow up). How many bytes move the planner does not say, so arrows have no length, and memory is drawn as without it.");
  words.push("Copies are PyTorch's plan; in a pipeline JAX's do not reach from one action into the next.");
  find("offload-words").replaceChildren(...words.map((text) => h("p", {}, text)));
}

function showLimits(data) {
  const alike = data.replicas * data.contextRanks;
  const words = [
    "Times are seconds of a roofline: of every operation the longer of its products at the device's rate and of what it reads and writes at its memory's. diptych plan prints the same times, by the same cost model. Beside measured steps on a CPU, PyTorch takes 1.0 to 2.0 times and JAX 1.4 to 4.3 times as long (docs/planner.md); they have not been measured on a GPU. Launches, messages that wait for one another on a wire, and whatever a machine does besides are left out.",
    "Memory is what a rank holds from one action to the next, as diptych plan prints it; what an action needs only while it runs, messages and flattened gradients on their way are left out. Gradients are counted in full from the beginning.",
  ];
  if (alike > 1) words.push(`A row stands for ${count(alike, "rank")}: ${count(data.replicas, "replica")} of ${count(data.contextRanks, "context rank")}, which do the same. What context ranks send each other is within F and I; the sum of gradients over all of them comes after the last backward.`);
  find("limits").replaceChildren(...words.map((text) => h("p", {}, text)));
}

function showLegend(course) {
  const swatch = (...shapes) => svg("svg", { width: 16, height: 12, "aria-hidden": "true" }, ...shapes);
  const square = (name) => swatch(svg("rect", { class: name, width: 16, height: 12, rx: 2 }));
  const kinds = Object.keys(KINDS).filter((kind) => course.kind.includes(kind));
  const entries = kinds.map((kind) => [square(kind), `${kind} ${KINDS[kind]}`]);
  if (course.stages.some((stage) => stage.recomputed > 0)) {
    entries.push([swatch(svg("rect", { class: "B", width: 16, height: 12, rx: 2 }), svg("path", { class: "hatch-line", d: "M3 12L11 0M9 12L16 2" })), "computed again"]);
  }
  entries.push([square("track"), "idle"]);
  for (const name of ["parameters", "gradients", "moments"]) entries.push([square(name), name]);
  entries.push([square("kept"), "kept for backward"]);
  if (course.stages.some((stage) => stage.waiting > 0)) entries.push([square("waiting"), "waits for W"]);
  if (course.copies?.parameters) entries.push([square("copy"), "copy to the device"], [square("copy late"), "late copy"], [square("copy out"), "copy to the host"]);
  if (course.copies?.activations) entries.push([swatch(svg("path", { class: "mark", d: "M5 1V10M2 7L5 10L8 7" })), "activations leave (down), come back (up)"]);
  if (course.gradients + course.update > 0) entries.push([square("after-update"), "sum of gradients, update"]);
  if (course.virtual > 1) entries.push([swatch(), "later stages of a rank are lighter"]);
  find("legend").replaceChildren(...entries.map(([shape, text]) => h("li", {}, shape, text)));
}
