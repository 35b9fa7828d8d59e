/* The page's state and event handlers. */

const data = JSON.parse(find("plan").textContent);
const simulations = new Map();
const chart = new Timeline(find("chart"), data);
const state = { schedule: 0, microbatch: -1, place: 0, at: -1, timer: 0 };
const PAUSE = 1800; // milliseconds between played steps

const simulation = () => {
  if (!simulations.has(state.schedule)) simulations.set(state.schedule, simulationOf(data.schedules[state.schedule]));
  return simulations.get(state.schedule);
};

/** Return the end of the time axis, shared by all schedules of the pipeline if the user wants to compare them. */
function axisEnd() {
  const total = (each) => each.makespan + each.gradients + each.update;
  if (!find("same").checked) return total(simulation());
  const others = data.schedules.filter((each) => each.ranksCount === simulation().ranksCount);
  return Math.max(...others.map(total));
}

function chooseSchedule(index) {
  stop();
  state.schedule = index;
  state.at = -1;
  find("schedule").value = index;
  for (const radio of document.querySelectorAll("#schedules input")) radio.checked = Number(radio.value) === index;
  const now = simulation();
  chart.marked = { at: -1, microbatch: -1, step: -1 };
  chart.draw(now, axisEnd());
  find("chart").setAttribute("aria-label", `${nameOf(now)}: ${count(now.ranksCount, "rank")}, ${now.size} actions in ${time(now.makespan)}, bubble ${share(now.idle)}`);
  find("reading").textContent = reading(now);
  find("microbatch").max = now.microbatches - 1;
  for (const show of [showFigures, showRanks, showStages, showAgain, showOffload, showLegend]) show(now, data);
  follow(Math.min(state.microbatch, now.microbatches - 1));
  showPan();
}

function reading(now) {
  const [unit] = unitOf(now.total);
  const rows = now.ranksCount > 1 ? "One row per rank" : "One rank";
  const axis = data.schedules.length > 1 && find("same").checked ? " The axis ends with the slowest schedule, for comparison." : "";
  return `${rows}, time from left to right in ${unit}, numbers are microbatches. Below a row is the rank's memory, on one scale; the mark is its peak.${axis}`;
}

/** Follow a microbatch from its first action; -1: none. */
function follow(microbatch, place = 0) {
  state.microbatch = microbatch;
  state.place = place;
  const now = simulation();
  const on = microbatch >= 0;
  find("followed").textContent = on ? String(microbatch) : "none";
  if (on) find("microbatch").value = microbatch;
  find("follow").hidden = !on;
  find("leave").disabled = find("before").disabled = !on;
  if (!on) {
    chart.follow(-1);
    hint();
    return;
  }
  find("follow-title").textContent = `Microbatch ${microbatch}, step by step`;
  find("steps").replaceChildren(...now.byMicrobatch[microbatch].map((id, at) => {
    const idle = idleBefore(now, id);
    const button = h("button", { type: "button", "data-action": id },
      h("span", { class: "place" }, String(at + 1)), h("span", { class: `chip ${now.kind[id]}` }, now.kind[id]),
      h("span", {}, `${NOUNS[now.kind[id]]}, stage ${now.stage[id]}, rank ${now.rank[id]}`),
      h("span", {}, between(now, id)), h("span", { class: "waits muted" }, idle > 1e-9 * now.total ? `after ${time(idle)} idle` : ""));
    button.addEventListener("click", () => { stop(); step(at); });
    return h("li", {}, button);
  }));
  step(place);
}

/** Describe one step of the followed microbatch. */
function step(place) {
  const now = simulation();
  const ids = now.byMicrobatch[state.microbatch];
  state.place = Math.max(0, Math.min(place, ids.length - 1));
  const id = ids[state.place];
  find("steps").childNodes.forEach((item, at) => {
    if (at === state.place) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  const item = find("steps").childNodes[state.place];
  find("steps").scrollTop = item.offsetTop - find("steps").offsetTop - 120;
  find("before").disabled = state.place === 0;
  find("next").disabled = state.place === ids.length - 1;
  chart.reveal(id);
  chart.follow(state.microbatch, id);
  say(`Step ${state.place + 1} of ${ids.length}. ${story(now, id, data)}`);
}

function play() {
  if (state.timer) { stop(); return; }
  if (state.microbatch < 0) follow(0);
  else if (state.place === simulation().byMicrobatch[state.microbatch].length - 1) step(0);
  find("play").textContent = "Pause";
  find("play").setAttribute("aria-pressed", "true");
  state.timer = setInterval(() => {
    if (state.place >= simulation().byMicrobatch[state.microbatch].length - 1) stop();
    else step(state.place + 1);
  }, PAUSE);
}

function stop() {
  clearInterval(state.timer);
  state.timer = 0;
  find("play").textContent = "Play";
  find("play").setAttribute("aria-pressed", "false");
}

const say = (text, isHint = false) => {
  find("description").textContent = text;
  find("description").classList.toggle("hint", isHint);
};

const hint = () => say("Point at a cell to see what it is and what it waited for; click it, or press Play, to follow its microbatch through the ranks.", true);

/** Select a cell and describe it; -1: none. */
function select(id) {
  state.at = id;
  chart.select(id);
  if (id < 0) return;
  find(`a${id}`).setAttribute("aria-label", facts(simulation(), id));
  say(facts(simulation(), id));
  chart.cursor(simulation().start[id]);
}

function showPan() {
  const [from, to] = chart.view;
  const free = chart.end - (to - from);
  find("pan").style.visibility = free > 1e-9 * chart.end ? "visible" : "hidden";
  find("pan").value = free > 0 ? (1000 * from) / free : 0;
}

function zoom(factor, center) {
  chart.zoom(factor, center ?? (state.at >= 0 ? simulation().start[state.at] : undefined));
  showPan();
}

function showAll() {
  chart.look(0, chart.end);
  showPan();
}

function moved(key) {
  const now = simulation();
  if (state.at < 0) return now.first[0];
  const rank = now.rank[state.at];
  const other = { ArrowUp: rank - 1, ArrowDown: rank + 1 }[key];
  if (other !== undefined) return other < 0 || other >= now.ranksCount ? state.at : actionAt(now, other, (now.start[state.at] + now.end[state.at]) / 2);
  const place = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, Home: now.first[rank], End: now.first[rank + 1] - 1 }[key];
  return Math.max(now.first[rank], Math.min(place, now.first[rank + 1] - 1));
}

find("chart").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    Enter: () => { if (state.at >= 0) { stop(); followAction(state.at); } },
    Escape: () => { stop(); select(-1); chart.cursor(undefined); follow(-1); },
    "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6), 0: showAll,
  };
  if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") select(moved(event.key));
  else if (actions[event.key]) actions[event.key]();
  else return;
  event.preventDefault();
  showPan();
});

function followAction(id) {
  const now = simulation();
  follow(now.microbatch[id], now.byMicrobatch[now.microbatch[id]].indexOf(id));
}

/** Handle pointing, dragging and the wheel. */
const drag = { from: null, moved: false };
const cellOf = (event) => {
  const cell = event.target.closest?.(".cell");
  return cell ? Number(cell.id.slice(1)) : -1;
};
const pixelOf = (event) => event.clientX - find("chart").getBoundingClientRect().left;

find("chart").addEventListener("pointerdown", (event) => {
  drag.from = [event.clientX, chart.view];
  drag.moved = false;
});
find("chart").addEventListener("pointermove", (event) => {
  if (drag.from && event.buttons) {
    const [x, view] = drag.from;
    if (Math.abs(event.clientX - x) > 4) drag.moved = true;
    const away = ((event.clientX - x) / chart.width) * (view[1] - view[0]);
    if (drag.moved) { chart.look(view[0] - away, view[1] - away); showPan(); }
    return;
  }
  const x = pixelOf(event);
  chart.cursor(x >= chart.left ? chart.seconds(x) : undefined);
  const id = cellOf(event);
  if (id >= 0 && id !== state.at && !state.timer) {
    state.at = id;
    chart.marked.at = id;
    chart.drawLabels();
    say(facts(simulation(), id));
  }
});
window.addEventListener("pointerup", () => { drag.from = null; });
find("chart").addEventListener("pointerleave", () => {
  chart.cursor(undefined);
  if (state.microbatch >= 0 && !state.timer) step(state.place);
  else if (state.microbatch < 0) hint();
});
find("chart").addEventListener("click", (event) => {
  const id = cellOf(event);
  if (drag.moved || id < 0) return;
  stop();
  followAction(id);
});
find("chart").addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 300), chart.seconds(pixelOf(event)));
}, { passive: false });

find("pan").addEventListener("input", (event) => {
  const wide = chart.view[1] - chart.view[0];
  const from = (event.target.value / 1000) * (chart.end - wide);
  chart.look(from, from + wide);
});
find("in").addEventListener("click", () => zoom(1.6));
find("out").addEventListener("click", () => zoom(1 / 1.6));
find("fit").addEventListener("click", showAll);
find("microbatch").addEventListener("input", (event) => { stop(); follow(Number(event.target.value)); });
find("before").addEventListener("click", () => { stop(); step(state.place - 1); });
find("next").addEventListener("click", () => { stop(); if (state.microbatch < 0) follow(0); else step(state.place + 1); });
find("leave").addEventListener("click", () => { stop(); follow(-1); });
find("play").addEventListener("click", play);
for (const name of ["memory", "copies"]) {
  find(name).addEventListener("change", (event) => {
    chart.shows[name] = event.target.checked;
    const { view, marked } = chart;
    chart.draw(simulation(), chart.end);
    chart.look(...view);
    chart.follow(marked.microbatch, marked.step);
  });
}

find("same-choice").hidden = data.schedules.length < 2;
find("same").addEventListener("change", () => chooseSchedule(state.schedule));

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  find("theme").textContent = dark ? "Light" : "Dark";
}
find("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches);
preferred.addEventListener("change", () => setTheme(preferred.matches));

new ResizeObserver(() => chart.resize()).observe(find("frame"));
showWords(data);
showSchedules(data, chooseSchedule);
showLimits(data);
chooseSchedule(0);
