/* The timeline: one row of cells per rank, with its memory and copies below it, on one time axis. */

const SPAN = 100000; // width of a step in drawing units, which a transform scales to pixels
const AXIS = 30;

class Timeline {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.shows = { memory: true, copies: true };
    this.marked = { at: -1, microbatch: -1, step: -1 };
  }

  /** Draw a schedule; end: end of the axis, in seconds. */
  draw(simulation, end) {
    this.simulation = simulation;
    this.end = end;
    this.measure();
    this.view = [0, end];
    this.scaled = svg("g");
    this.labels = svg("g", { "aria-hidden": "true" });
    this.arrows = svg("g", { "aria-hidden": "true" });
    this.axis = svg("g", { class: "axis", "aria-hidden": "true" });
    this.gutter = svg("g", { "aria-hidden": "true" });
    this.line = svg("g", { "aria-hidden": "true", visibility: "hidden" });
    this.pattern = svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      svg("line", { class: "hatch-line", x1: 1.2, x2: 1.2, y1: 0, y2: 5 }));
    const clip = svg("clipPath", { id: "plot" }, (this.window = svg("rect", { y: 0 })));
    const plot = svg("g", { "clip-path": "url(#plot)" }, this.axis, this.scaled, this.arrows, this.labels, this.line);
    this.cells = new Array(simulation.size);
    const lasts = simulation.stages.flatMap((stage) => [stage.F, stage.I, stage.W]).filter((seconds) => seconds > 0);
    this.shortest = Math.min(...lasts);
    for (let rank = 0; rank < simulation.ranksCount; rank++) this.drawRank(rank);
    this.drawAfter();
    this.root.replaceChildren(svg("defs", {}, clip, this.pattern), plot, this.gutter);
    this.resize();
  }

  /** Choose the heights of rows, smaller if there are many. */
  measure() {
    const { simulation, shows } = this;
    const many = simulation.ranksCount > 16;
    const wide = simulation.copies && shows.copies && simulation.copies.ranks.length > 0;
    this.sizes = {
      cell: many ? 14 : 28,
      memory: shows.memory ? (many ? 18 : 46) : 0,
      copies: wide ? (many ? 7 : 10) * (simulation.copies.parameters && simulation.copies.activations ? 2 : 1) : 0,
      gap: many ? 5 : 18,
      above: many ? 3 : 16, // room for the peak's number
    };
    const { cell, memory: tall, copies, gap, above } = this.sizes;
    this.copiesTop = cell + 4 + (tall && tall + above);
    this.row = cell + (tall && tall + above) + (copies && copies + 4) + gap;
    this.height = AXIS + this.row * simulation.ranksCount;
    this.largest = Math.max(...simulation.ranks.map((rank) => rank.memory.total)) || 1;
  }

  top(rank) {
    return AXIS + this.row * rank;
  }

  x(seconds) {
    return (seconds / this.end) * SPAN;
  }

  drawRank(rank) {
    const { simulation, sizes } = this;
    const group = svg("g", { transform: `translate(0 ${this.top(rank)})` });
    group.append(svg("rect", { class: "track", width: this.x(simulation.makespan), height: sizes.cell }));
    const stages = Array.from({ length: simulation.virtual }, (_, place) => {
      const later = place && Math.round((24 * place) / (simulation.virtual - 1));
      return svg("g", { style: later ? `--later:${later}%` : null });
    });
    group.append(...stages);
    for (let id = simulation.first[rank]; id < simulation.first[rank + 1]; id++) {
      const kind = simulation.kind[id];
      const stage = simulation.stages[simulation.stage[id]];
      const cell = svg("rect", {
        id: `a${id}`, class: `cell ${kind}`, x: this.x(simulation.start[id]), width: this.x(simulation.lasts(id)), height: sizes.cell,
        "data-rank": rank, "data-kind": kind, "data-stage": simulation.stage[id], "data-microbatch": simulation.microbatch[id],
      });
      this.cells[id] = [cell];
      stages[stage.virtual].append(cell);
      if ((kind === "B" || kind === "I") && stage.recomputed > 0) {
        const again = svg("rect", { class: "again", x: this.x(simulation.start[id]), width: this.x(stage.recomputed), height: sizes.cell });
        this.cells[id].push(again);
        stages[stage.virtual].append(again);
      }
    }
    if (sizes.memory) this.drawMemory(group, rank);
    if (sizes.copies) this.drawCopies(group, rank);
    this.scaled.append(group);
  }

  /** Draw the rank's parameters, gradients and moments, and above them the bytes saved for backward and for W. */
  drawMemory(group, rank) {
    const { simulation, sizes } = this;
    const base = sizes.cell + sizes.above + sizes.memory;
    const y = (size) => base - (size / this.largest) * sizes.memory;
    const parts = simulation.ranks[rank].memory;
    let below = 0;
    for (const name of ["parameters", "gradients", "moments"]) {
      const height = y(below) - y(below + parts[name]);
      below += parts[name];
      group.append(svg("rect", { class: name, y: y(below), width: this.x(simulation.total), height }));
    }
    let saved = `M0 ${y(below)}`;
    let waiting = `M0 ${y(below)}`;
    let back = "";
    for (let id = simulation.first[rank]; id < simulation.first[rank + 1]; id++) {
      const x = this.x(simulation.kind[id] === "F" ? simulation.start[id] : simulation.end[id]);
      const level = y(below + simulation.saved[id]);
      saved += `H${x}V${level}`;
      waiting += `H${x}V${y(below + simulation.saved[id] + simulation.waiting[id])}`;
      back = `V${level}H${x}` + back;
    }
    group.append(svg("path", { class: "saved", d: `${saved}H${this.x(simulation.makespan)}V${y(below)}Z` }));
    if (simulation.waiting.some((size) => size > 0)) group.append(svg("path", { class: "waiting", d: `${waiting}${back}V${y(below)}Z` }));
  }

  drawCopies(group, rank) {
    const { simulation, sizes } = this;
    const top = this.copiesTop;
    const copies = simulation.copies.ranks[rank];
    const height = copies.marks ? sizes.copies / 2 : sizes.copies; // the lower half is the activations'
    group.append(svg("rect", { class: "track", y: top, width: this.x(simulation.total), height: sizes.copies }));
    for (let i = 0; i < (copies.begin ?? []).length; i++) {
      const end = Math.min(copies.end[i], simulation.total);
      group.append(svg("rect", {
        class: `copy${copies.late[i] ? " late" : ""}${copies.toDevice[i] ? "" : " out"}`, "data-copy": i, "data-rank": rank,
        x: this.x(copies.begin[i]), width: this.x(end - copies.begin[i]), y: top, height,
      }));
    }
  }

  /** Draw the sum of gradients and the update, after the last backward. */
  drawAfter() {
    const { simulation, sizes } = this;
    let begin = simulation.makespan;
    for (const name of ["gradients", "update"]) {
      for (let rank = 0; rank < simulation.ranksCount && simulation[name] > 0; rank++) {
        this.scaled.append(svg("rect", {
          class: `after-${name}`, x: this.x(begin), width: this.x(simulation[name]), y: this.top(rank), height: sizes.cell,
        }));
      }
      begin += simulation[name];
    }
  }

  /** Fit the drawing to the available width. */
  resize() {
    const width = Math.max(240, this.root.parentElement.clientWidth);
    this.left = width < 560 ? 66 : 96;
    this.width = width - this.left - 2;
    for (const [name, value] of Object.entries({ height: this.height, viewBox: `0 0 ${width} ${this.height}` })) {
      this.root.setAttribute(name, value);
    }
    for (const [name, value] of Object.entries({ x: this.left, width: this.width, height: this.height })) {
      this.window.setAttribute(name, value);
    }
    this.place();
  }

  /** Return the pixel of a time. */
  pixel(seconds) {
    return this.left + ((seconds - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  /** Return the time at a pixel. */
  seconds(pixel) {
    return this.view[0] + ((pixel - this.left) / this.width) * (this.view[1] - this.view[0]);
  }

  /** Show a part of the step. */
  look(from, to) {
    const wide = Math.min(this.end, Math.max(to - from, this.end / 2000));
    const begin = Math.min(Math.max(0, from), this.end - wide);
    this.view = [begin, begin + wide];
    this.place();
  }

  zoom(factor, center = (this.view[0] + this.view[1]) / 2) {
    const wide = (this.view[1] - this.view[0]) / factor;
    const part = (center - this.view[0]) / (this.view[1] - this.view[0]);
    this.look(center - part * wide, center + (1 - part) * wide);
  }

  /** Lay out all elements for the current view. */
  place() {
    const scale = (this.width * this.end) / (this.view[1] - this.view[0]) / SPAN;
    this.scaled.setAttribute("transform", `translate(${this.left - this.x(this.view[0]) * scale} 0) scale(${scale} 1)`);
    this.pattern.setAttribute("patternTransform", `scale(${1 / scale} 1) rotate(45)`);
    // Lines between cells would hide narrow ones.
    const narrow = this.pixel(this.shortest) - this.pixel(0);
    this.scaled.style.setProperty("--line-width", narrow > 8 ? 1 : narrow > 4 ? 0.5 : 0);
    this.drawAxis();
    this.drawLabels();
    this.drawGutter();
    this.drawArrows();
  }

  drawAxis() {
    const [from, to] = this.view;
    const [, unit] = unitOf(this.simulation.total);
    const rough = ((to - from) / unit) * (Math.max(80, 0.1 * this.width) / this.width);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((nice) => nice * power >= rough) * power;
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    this.axis.replaceChildren();
    for (let value = Math.ceil(from / unit / step) * step; value <= to / unit + 1e-9; value += step) {
      const x = this.pixel(value * unit);
      this.axis.append(svg("line", { class: "grid-line", x1: x, x2: x, y1: 18, y2: this.height }));
      const anchor = x < this.left + 20 ? "start" : x > this.left + this.width - 20 ? "end" : "middle";
      this.axis.append(svg("text", { x, y: 12, "text-anchor": anchor }, value.toFixed(places)));
    }
  }

  /** Draw numbers in cells that are wide enough, and the peaks. */
  drawLabels() {
    const { simulation, sizes, marked } = this;
    this.labels.replaceChildren();
    const small = sizes.cell < 20;
    const wide = small ? 5.4 : 6.6;
    const digits = String(simulation.microbatches - 1).length;
    for (let rank = 0; rank < simulation.ranksCount; rank++) {
      for (let id = simulation.first[rank]; id < simulation.first[rank + 1]; id++) {
        if (simulation.end[id] < this.view[0] || simulation.start[id] > this.view[1]) continue;
        const begin = this.pixel(simulation.start[id]);
        const room = this.pixel(simulation.end[id]) - begin;
        const number = String(simulation.microbatch[id]);
        if (room < wide * digits + 3) continue; // numbers of a kind appear all together or not at all
        const text = room > wide * (digits + 2) + 6 ? `${simulation.kind[id]} ${number}` : number;
        const mine = simulation.microbatch[id] === marked.microbatch ? " mine" : "";
        this.labels.append(svg("text", {
          class: `number ${simulation.kind[id]}${mine}${small ? " small" : ""}`, x: begin + room / 2,
          y: this.top(rank) + sizes.cell / 2 + (small ? 3 : 4),
        }, text));
      }
      if (sizes.memory) this.drawPeak(rank);
      if (sizes.copies && simulation.copies.ranks[rank].marks) this.drawMarks(rank);
    }
    if (marked.at >= 0) this.frame(marked.at, "outline");
    if (marked.step >= 0) this.frame(marked.step, "now");
  }

  frame(id, name) {
    const { simulation, sizes } = this;
    const x = this.pixel(simulation.start[id]);
    const width = Math.max(2, this.pixel(simulation.end[id]) - x);
    this.labels.append(svg("rect", { class: name, x, width, y: this.top(simulation.rank[id]), height: sizes.cell, rx: 1.5 }));
  }

  drawPeak(rank) {
    const { simulation, sizes } = this;
    const { peakTime, memory: parts } = simulation.ranks[rank];
    const y = this.top(rank) + sizes.cell + sizes.above + sizes.memory * (1 - parts.total / this.largest);
    const x = this.pixel(peakTime);
    if (x < this.left - 1 || x > this.left + this.width + 1) return;
    const text = `peak ${memory(parts.total, this.data.memoryUnit)}`;
    const right = x + 8 + 7 * text.length < this.left + this.width;
    const side = right ? { x: x + 8, "text-anchor": "start" } : { x: x - 8, "text-anchor": "end" };
    this.labels.append(svg("path", { class: "peak-mark", "data-rank": rank, "data-bytes": parts.total, d: `M${x} ${y}l-4 -6h8z` }));
    if (sizes.memory > 20) this.labels.append(svg("text", { class: "peak-text", "data-rank": rank, ...side, y: y - 1 }, text));
  }

  /** Draw marks for activations that move to the host (down) and are requested again (up). */
  drawMarks(rank) {
    const { sizes, simulation } = this;
    const { time: times, toDevice } = simulation.copies.ranks[rank].marks;
    const half = simulation.copies.parameters ? sizes.copies / 2 : 0;
    const top = this.top(rank) + this.copiesTop + half;
    const bottom = top + sizes.copies - half;
    const [from, to] = this.view;
    for (let i = 0; i < times.length; i++) {
      if (times[i] < from || times[i] > to) continue;
      const x = this.pixel(times[i]);
      const [tail, tip] = toDevice[i] ? [bottom - 1, top + 1] : [top + 1, bottom - 1];
      const turn = tip + (toDevice[i] ? 3 : -3);
      this.labels.append(svg("path", { class: "mark", d: `M${x} ${tail}V${tip}M${x - 2.5} ${turn}L${x} ${tip}L${x + 2.5} ${turn}` }));
    }
  }

  /** Draw the names of rows, and the bytes of a rank at the cursor. */
  drawGutter() {
    const { simulation, sizes } = this;
    const held = this.at === undefined ? null : this.at;
    this.gutter.replaceChildren();
    for (let rank = 0; rank < simulation.ranksCount; rank++) {
      const top = this.top(rank);
      this.gutter.append(svg("text", { class: "rank", x: 0, y: top + sizes.cell / 2 + 4 }, `rank ${rank}`));
      if (sizes.memory > 20) {
        const parts = simulation.ranks[rank].memory;
        const saved = held === null ? [0, 0] : savedAt(simulation, rank, held);
        const sum = parts.parameters + parts.gradients + parts.moments + saved[0] + saved[1];
        const text = held === null ? "memory" : memory(sum, this.data.memoryUnit);
        this.gutter.append(svg("text", { class: "held", x: 0, y: top + sizes.cell + sizes.above + sizes.memory - 4 }, text));
      }
      if (sizes.copies > 8) this.gutter.append(svg("text", { x: 0, y: top + this.row - sizes.gap - 1 }, "copies"));
    }
  }

  /** Draw the messages of the followed microbatch. */
  drawArrows() {
    const { simulation, marked, sizes } = this;
    this.arrows.replaceChildren();
    if (marked.microbatch < 0) return;
    for (const id of simulation.byMicrobatch[marked.microbatch]) {
      const other = simulation.receiver(id);
      if (other === undefined || simulation.rank[other] === simulation.rank[id]) continue;
      const down = simulation.rank[other] > simulation.rank[id];
      const x1 = this.pixel(simulation.end[id]);
      const y1 = this.top(simulation.rank[id]) + sizes.cell / 2;
      const x2 = this.pixel(simulation.end[id] + simulation.wire);
      const y2 = this.top(simulation.rank[other]) + (down ? -1 : sizes.cell + 1);
      const x3 = this.pixel(simulation.start[other]);
      const hot = id === marked.step || other === marked.step ? " hot" : "";
      const bend = down ? 14 : -14;
      const tip = down ? -5 : 5;
      this.arrows.append(
        svg("path", { class: `message${hot}`, "data-from": id, "data-to": other, d: `M${x1} ${y1}C${x1 + 10} ${y1 + bend} ${x2} ${y2 - 2 * bend} ${x2} ${y2}` }),
        svg("path", { class: `message-end${hot}`, d: `M${x2} ${y2}l-3.5 ${tip}h7z` }),
      );
      if (x3 - x2 > 4) this.arrows.append(svg("path", { class: `message waits${hot}`, d: `M${x2} ${y2}H${x3}` }));
    }
  }

  /** Highlight the cells of one microbatch, or of all (-1); step: the described action. */
  follow(microbatch, step = -1) {
    this.marked = { ...this.marked, microbatch, step };
    this.root.classList.toggle("following", microbatch >= 0);
    for (const element of this.root.querySelectorAll(".mine")) element.classList.remove("mine");
    if (microbatch >= 0) {
      for (const id of this.simulation.byMicrobatch[microbatch]) for (const part of this.cells[id]) part.classList.add("mine");
    }
    this.drawLabels();
    this.drawArrows();
  }

  /** Frame an action, and scroll to it. */
  select(id) {
    this.marked.at = id;
    this.root.setAttribute("aria-activedescendant", id < 0 ? "" : `a${id}`);
    if (id < 0 || !this.reveal(id)) this.drawLabels();
  }

  /** Scroll to an action; return true if the view changed. */
  reveal(id) {
    const { simulation, view } = this;
    if (simulation.start[id] >= view[0] && simulation.end[id] <= view[1]) return false;
    const wide = view[1] - view[0];
    this.look(simulation.start[id] - wide / 3, simulation.start[id] + (2 * wide) / 3);
    return true;
  }

  /** Draw the cursor line at a time, with the bytes of all ranks; undefined: hide it. */
  cursor(seconds) {
    this.at = seconds;
    this.line.setAttribute("visibility", seconds === undefined ? "hidden" : "visible");
    if (seconds !== undefined) {
      const x = this.pixel(seconds);
      const near = Math.min(Math.max(x, this.left + 34), this.left + this.width - 34);
      this.line.replaceChildren(
        svg("line", { class: "cursor", x1: x, x2: x, y1: 16, y2: this.height }),
        svg("text", { class: "cursor-time", x: near, y: 12 }, clock(seconds, this.simulation.total)),
      );
    }
    this.drawGutter();
  }
}
