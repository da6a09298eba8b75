// @ts-check
// The timeline: one canvas that shows what every rank does, what it waits for and what it holds, and that can be zoomed,
// moved and played. Any element of class "timeline" becomes one; its attribute data-timeline is what
// dashboard/charts/timeline.py makes of a step. The view survives new data: it is kept as shares of the step.

/**
 * @typedef {{name: string, letter: string, colour: string}} Kind
 * @typedef {Object} Data
 * @property {number} stepTime  seconds
 * @property {number} axis  seconds that the whole width stands for: the step, or the longest of several
 * @property {number} begin  when the first action starts, seconds
 * @property {number[]} ranks
 * @property {number[][]} stages  of each rank
 * @property {Kind[]} kinds
 * @property {number} limit  bytes of memory that a rank has
 * @property {Int32Array} first  where each rank's actions begin
 * @property {Float32Array} start
 * @property {Float32Array} end
 * @property {Float32Array} arrived
 * @property {Float32Array} sendStart
 * @property {Float32Array} sendEnd
 * @property {Uint8Array} kind
 * @property {Int32Array} stage
 * @property {Int32Array} microbatch
 * @property {Int32Array} sender
 * @property {Int32Array} memoryFirst
 * @property {Float32Array} memoryTime
 * @property {Float32Array} memory
 * @property {Float32Array} collected  when the collectives that an action waits for had ended
 * @property {Kind[]} laneKinds
 * @property {Float32Array} lane  row, kind, stage, start, end of each collective; five numbers each
 * @property {number} replicas
 * @property {{name: string, stepTime: number, busy: Float32Array} | null} ghost  row, start, end of each busy stretch
 * @property {Float32Array | null} critical  row, where (0 compute, 1 message, 2 collective), start, end; four numbers each
 * @typedef {{row: number, action: number, time: number, collective?: number}} Place  action -1: the rank is idle
 */

(() => {
  const GUTTER = 64, AXIS = 24, MINIMAP = 30, GAP = 8, RIGHT = 10;
  const MOST_BARS = 30000; // beyond, rows are drawn as busy shares
  const PLAY_S = 10;
  const SEEN = 0.012; // of the whole width: how long a message is seen at least while the step is played
  const CAUSES = [
    { name: "nothing has reached the rank yet", short: "filling" },
    { name: "waits for another rank's work", short: "waiting for work" },
    { name: "waits for a message on its way", short: "message on its way" },
    { name: "is done, and waits for the end of the step", short: "draining" },
    { name: "waits for what replicas do together", short: "waiting for replicas" },
  ];

  /** @param {string} text @returns {ArrayBuffer} */
  function bytes(text) {
    const raw = atob(text), found = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
    return found.buffer;
  }

  /** @param {string} text @returns {Data} */
  function unpacked(text) {
    const raw = JSON.parse(text);
    const f4 = (/** @type {string} */ name) => new Float32Array(bytes(raw[name]));
    const i4 = (/** @type {string} */ name) => new Int32Array(bytes(raw[name]));
    return {
      stepTime: raw.step_time, axis: raw.axis ?? raw.step_time, begin: raw.begin, ranks: raw.ranks, stages: raw.stages, kinds: raw.kinds, limit: raw.limit,
      first: i4("first"), start: f4("start"), end: f4("end"), arrived: f4("arrived"),
      sendStart: f4("send_start"), sendEnd: f4("send_end"), kind: new Uint8Array(bytes(raw.kind)), stage: i4("stage"),
      microbatch: i4("microbatch"), sender: i4("sender"), memoryFirst: i4("memory_first"),
      memoryTime: f4("memory_time"), memory: f4("memory"), collected: f4("collected"), laneKinds: raw.lane_kinds, lane: f4("lane"),
      replicas: raw.replicas,
      ghost: raw.ghost ? { name: raw.ghost.name, stepTime: raw.ghost.step_time, busy: new Float32Array(bytes(raw.ghost.busy)) } : null,
      critical: raw.critical ? f4("critical") : null,
    };
  }

  /** @param {number} s */
  function seconds(s) {
    const [size, unit] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
    return `${(s / Number(size)).toPrecision(3)} ${unit}`;
  }

  /** @param {number} b */
  function gibi(b) {
    return b >= 2 ** 30 ? `${(b / 2 ** 30).toFixed(1)} GiB` : `${(b / 2 ** 20).toFixed(1)} MiB`;
  }

  /** @param {string} colour @returns {[number, number, number]} */
  function rgb(colour) {
    return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  }

  class Timeline {
    /** @param {HTMLElement} host */
    constructor(host) {
      this.host = host;
      this.view = { from: 0, to: 1 };
      /** @type {Place | null} */ this.hovered = null;
      /** @type {number | null} */ this.cursor = null;
      /** @type {number | null} */ this.pointed = null;
      this.playing = false;
      this.isDense = false;
      /** @type {Data | null} */ this.data = null;
      /** @type {Float32Array[] | null} */ this.sums = null;
      /** Kinds that occur. @type {number[]} */ this.present = [];
      this.frame = 0;
      this.text = "";
      this.build();
    }

    build() {
      this.host.replaceChildren();
      const bar = document.createElement("div");
      bar.className = "timeline-bar";
      const button = (/** @type {string} */ label, /** @type {string} */ text, /** @type {() => void} */ act) => {
        const made = document.createElement("button");
        made.type = "button";
        made.textContent = text;
        made.setAttribute("aria-label", label);
        made.title = label;
        made.onclick = act;
        bar.append(made);
        return made;
      };
      button("zoom in (W)", "+", () => this.zoom(0.5));
      button("zoom out (S)", "\u2212", () => this.zoom(2));
      button("show the whole step (0)", "whole step", () => this.look(0, 1));
      this.player = button("play the step", "\u25b6", () => this.play());
      this.scrub = document.createElement("input");
      this.scrub.type = "range";
      this.scrub.min = "0";
      this.scrub.max = "1000";
      this.scrub.value = "1000";
      this.scrub.setAttribute("aria-label", "moment of the step");
      this.scrub.oninput = () => this.seek(Number(this.scrub.value) / 1000);
      bar.append(this.scrub);
      this.legend = document.createElement("div");
      this.legend.className = "timeline-legend";
      this.canvas = document.createElement("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.panel = document.createElement("div");
      this.panel.className = "timeline-panel";
      this.host.append(bar, this.legend, this.canvas, this.panel);
      this.listen();
      new ResizeObserver(() => this.ask()).observe(this.host);
    }

    listen() {
      const canvas = this.canvas;
      const inPlot = (/** @type {MouseEvent} */ e) => this.share(e.offsetX);
      canvas.addEventListener("wheel", (e) => {
        e.preventDefault();
        if (e.shiftKey) this.pan((e.deltaY + e.deltaX) / this.width);
        else this.zoom(Math.exp(e.deltaY * 0.0015), inPlot(e));
      }, { passive: false });
      /** @type {{x: number, minimap: boolean} | null} */ let held = null;
      canvas.addEventListener("pointerdown", (e) => {
        held = { x: e.offsetX, minimap: e.offsetY > this.height - MINIMAP };
        canvas.setPointerCapture(e.pointerId);
        if (held.minimap) this.center((e.offsetX - GUTTER) / this.width);
      });
      canvas.addEventListener("pointermove", (e) => {
        if (held && held.minimap) this.center((e.offsetX - GUTTER) / this.width);
        else if (held) {
          this.pan((held.x - e.offsetX) / this.width);
          held.x = e.offsetX;
        } else this.hover(this.at(e.offsetX, e.offsetY));
      });
      canvas.addEventListener("pointerup", () => (held = null));
      canvas.addEventListener("pointerleave", () => this.hover(null));
      canvas.addEventListener("keydown", (e) => {
        const acts = {
          w: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), a: () => this.pan(-0.15), d: () => this.pan(0.15),
          "0": () => this.look(0, 1), ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
          ArrowUp: () => this.step(0, -1), ArrowDown: () => this.step(0, 1), " ": () => this.play(),
        };
        const act = acts[/** @type {keyof typeof acts} */ (e.key.length === 1 ? e.key.toLowerCase() : e.key)];
        if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
        e.preventDefault();
        act();
      });
    }

    /** New data under the same view. @param {string} text */
    show(text) {
      if (text === this.text) return;
      this.text = text;
      this.data = text ? unpacked(text) : null;
      this.sums = null;
      this.map = null;
      this.hovered = null;
      this.cursor = null;
      this.host.style.visibility = this.data ? "visible" : "hidden";
      if (!this.data) return;
      const d = this.data, there = d.kinds.map(() => false);
      for (let a = 0; a < d.kind.length; a++) there[d.kind[a]] = true;
      this.present = d.kinds.map((_, k) => k).filter((k) => there[k]);
      const several = d.stages.some((held) => held.length > 1);
      this.colours = d.stages.map((held) => new Map(held.map((stage, i) => {
        const lighter = several ? (0.55 * i) / Math.max(held.length - 1, 1) : 0;
        return [stage, d.kinds.map((kind) => `rgb(${rgb(kind.colour).map((c) => Math.round(c + lighter * (255 - c)))})`)];
      })));
      this.legend.replaceChildren(
        ...this.present.map((k) => this.key(d.kinds[k].name, d.kinds[k].colour)),
        ...d.laneKinds.filter((_, k) => d.lane.some((value, i) => i % 5 === 1 && value === k))
          .map((kind) => this.key(kind.name, kind.colour)),
        ...CAUSES.map((cause, i) => this.key(cause.short, "", i)).filter((_, i) => i < 4 || d.lane.length),
        this.key("memory", "#7a5195"),
        ...(d.ghost ? [this.key(`behind it: ${d.ghost.name}`, "#8d99ae")] : []),
        ...(d.critical ? [this.key("critical path", "#D55E00")] : []),
      );
      const busy = d.ranks.length === 1 ? "1 rank" : `${d.ranks.length} ranks`;
      this.canvas.setAttribute("aria-label", `timeline of ${busy}, ${seconds(d.stepTime)}. Keys: W and S zoom, A and D ` +
        "move, arrows go from action to action, space plays.");
      this.say(null);
      this.ask();
    }

    /** @param {string} name @param {string} colour @param {number} [cause] */
    key(name, colour, cause) {
      const entry = document.createElement("span");
      const sample = document.createElement("i");
      if (cause === undefined) sample.style.background = colour;
      else sample.className = `cause cause-${cause}`;
      entry.append(sample, name);
      return entry;
    }

    // --- where things are -----------------------------------------------------------------------------------------

    get width() { return Math.max(50, this.host.clientWidth - GUTTER - RIGHT); }
    get rowHeight() {
      const n = this.data ? this.data.ranks.length : 1;
      return Math.max(2, Math.min(64, Math.floor(560 / n)));
    }
    get plotHeight() { return this.rowHeight * (this.data ? this.data.ranks.length : 1); }
    get height() { return AXIS + this.plotHeight + GAP + MINIMAP; }
    get whole() { const d = /** @type {Data} */ (this.data); return { from: d.begin, length: d.axis }; }
    /** @param {number} t seconds */
    x(t) {
      const { from, length } = this.whole;
      return GUTTER + (((t - from) / length - this.view.from) / (this.view.to - this.view.from)) * this.width;
    }
    /** The share of the step at a pixel. @param {number} px */
    share(px) { return this.view.from + ((px - GUTTER) / this.width) * (this.view.to - this.view.from); }
    /** @param {number} px */
    time(px) { return this.whole.from + this.share(px) * this.whole.length; }

    /** The first action of a row that ends after a time. @param {number} row @param {number} t */
    after(row, t) {
      const { first, end } = /** @type {Data} */ (this.data);
      let low = first[row], high = first[row + 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (end[middle] > t) high = middle;
        else low = middle + 1;
      }
      return low;
    }

    /** @param {number} px @param {number} py @returns {Place | null} */
    at(px, py) {
      const d = this.data, row = Math.floor((py - AXIS) / this.rowHeight);
      if (!d || px < GUTTER || px > GUTTER + this.width || row < 0 || row >= d.ranks.length || py < AXIS) return null;
      const time = this.time(px), action = this.after(row, time), into = py - AXIS - row * this.rowHeight;
      if (into >= this.laneTop && into <= this.laneTop + this.laneHeight)
        for (let i = 0; i < d.lane.length; i += 5)
          if (d.lane[i] === row && d.lane[i + 3] <= time && time <= d.lane[i + 4])
            return { row, action: -1, time, collective: i };
      return { row, action: action < d.first[row + 1] && d.start[action] <= time ? action : -1, time };
    }

    // --- looking around -------------------------------------------------------------------------------------------

    /** @param {number} from @param {number} to shares of the step */
    look(from, to) {
      const length = Math.min(1, Math.max(1e-6, to - from));
      from = Math.min(Math.max(0, from), 1 - length);
      this.view = { from, to: from + length };
      this.ask();
    }
    /** @param {number} factor @param {number} [around] */
    zoom(factor, around = (this.view.from + this.view.to) / 2) {
      const { from, to } = this.view, length = Math.min(1, Math.max(1e-6, (to - from) * factor));
      const place = (around - from) / (to - from);
      this.look(around - place * length, around - place * length + length);
    }
    /** @param {number} share of what is in view */
    pan(share) {
      const { from, to } = this.view, by = share * (to - from);
      this.look(from + by, to + by);
    }
    /** @param {number} share of the step */
    center(share) {
      const half = (this.view.to - this.view.from) / 2;
      this.look(share - half, share + half);
    }
    /** @param {Place | null} place */
    hover(place) {
      this.point(place && place.time);
      if (this.host.classList.contains("linked"))
        for (const other of document.querySelectorAll(".timeline.linked"))
          if (other !== this.host) /** @type {any} */ (other).timeline?.point(place && place.time);
      const same = place?.action === this.hovered?.action && place?.row === this.hovered?.row && place?.action !== -1;
      this.hovered = place;
      this.say(place);
      if (!same) this.ask();
    }
    /** A line at a moment that is pointed at, here or on another that is linked. @param {number | null} time seconds */
    point(time) {
      if (time === this.pointed || !this.host.classList.contains("linked")) return;
      this.pointed = time;
      this.ask();
    }
    /** To the next action of the rank, or of another. @param {number} by @param {number} [rows] */
    step(by, rows = 0) {
      const d = this.data;
      if (!d) return;
      const here = this.hovered ?? { row: 0, action: d.first[0], time: d.begin };
      const row = Math.min(Math.max(0, here.row + rows), d.ranks.length - 1);
      let action = rows ? this.after(row, here.time) : (here.action < 0 ? this.after(row, here.time) : here.action) + by;
      action = Math.min(Math.max(action, d.first[row]), d.first[row + 1] - 1);
      const share = ((d.start[action] + d.end[action]) / 2 - this.whole.from) / this.whole.length;
      if (share < this.view.from || share > this.view.to) this.center(share);
      this.hover({ row, action, time: (d.start[action] + d.end[action]) / 2 });
    }

    play() {
      this.playing = !this.playing;
      this.player.textContent = this.playing ? "\u23f8" : "\u25b6";
      this.player.setAttribute("aria-label", this.playing ? "pause" : "play the step");
      let last = performance.now();
      const go = (/** @type {number} */ now) => {
        if (!this.playing || !this.host.isConnected) return;
        const share = Math.min(1, (this.cursor ?? 1) + (now - last) / 1000 / PLAY_S);
        last = now;
        this.seek(share);
        if (share < 1) requestAnimationFrame(go);
        else this.play();
      };
      if (this.playing) {
        if (this.cursor === null || this.cursor >= 1) this.cursor = 0;
        requestAnimationFrame(go);
      }
    }
    /** @param {number} share of the step */
    seek(share) {
      this.cursor = share;
      this.hovered = null;
      this.scrub.value = String(Math.round(1000 * share));
      this.scrub.setAttribute("aria-valuetext", this.data ? seconds(share * this.data.axis) : "");
      if (share >= 1 && !this.playing) this.cursor = null;
      else if (share < this.view.from || share > this.view.to) this.center(share);
      this.say(null);
      this.ask();
    }

    // --- words ----------------------------------------------------------------------------------------------------

    /** What the idle time around a moment is spent on. @param {number} row @param {number} time */
    idle(row, time) {
      const d = /** @type {Data} */ (this.data), next = this.after(row, time);
      if (next >= d.first[row + 1]) return { cause: time < this.laneEnd(row) ? 4 : 3, next: -1 };
      if (this.collects(next, next > d.first[row] ? d.end[next - 1] : d.begin)) return { cause: 4, next: -1 };
      if (next === d.first[row]) return { cause: 0, next };
      return { cause: d.sender[next] >= 0 && time >= d.end[d.sender[next]] ? 2 : 1, next };
    }
    /** Whether collectives are what an action waits for longest. @param {number} action @param {number} free */
    collects(action, free) {
      const { collected, arrived } = /** @type {Data} */ (this.data);
      return collected[action] > free && !(arrived[action] > collected[action]);
    }
    /** When the last collective of a row ends, seconds. @param {number} row */
    laneEnd(row) {
      const { lane } = /** @type {Data} */ (this.data);
      let end = 0;
      for (let i = 0; i < lane.length; i += 5) if (lane[i] === row) end = Math.max(end, lane[i + 4]);
      return end;
    }
    /** @param {number} row @param {number} time */
    memoryAt(row, time) {
      const d = /** @type {Data} */ (this.data);
      if (d.memoryFirst.length < 2) return 0;
      let low = d.memoryFirst[row], high = d.memoryFirst[row + 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (d.memoryTime[middle] > time) high = middle;
        else low = middle + 1;
      }
      return d.memory[Math.max(low - 1, d.memoryFirst[row])];
    }
    /** @param {number} action */
    rowOf(action) {
      const { first } = /** @type {Data} */ (this.data);
      let low = 0, high = first.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (first[middle] <= action) low = middle;
        else high = middle;
      }
      return low;
    }
    /** @param {number} action */
    called(action) {
      const d = /** @type {Data} */ (this.data), micro = d.microbatch[action];
      return d.kinds[d.kind[action]].name + (micro >= 0 ? ` of micro-batch ${micro} in stage ${d.stage[action]}` : "");
    }
    /** @param {Place | null} place */
    say(place) {
      const d = this.data;
      if (!d) return;
      if (!place) {
        this.panel.textContent = this.cursor === null ? "Point at an action: its micro-batch lights up in all ranks."
          : this.moment();
        return;
      }
      const rank = `Rank ${d.ranks[place.row]}`, memory = this.memoryAt(place.row, place.time);
      const held = d.memory.length ? ` It holds ${gibi(memory)} of ${gibi(d.limit)}.` : "";
      if (place.collective !== undefined) {
        const [, kind, stage, start, end] = d.lane.slice(place.collective, place.collective + 5);
        this.panel.textContent = `${rank}, with the ranks of all ${d.replicas} replicas that hold stage ${stage}: ` +
          `${d.laneKinds[kind].name}, ${seconds(start - d.begin)} to ${seconds(end - d.begin)}, takes ` +
          `${seconds(end - start)}.${held}`;
        return;
      }
      if (place.action < 0) {
        const { cause, next } = this.idle(place.row, place.time);
        const from = next >= 0 && d.sender[next] >= 0 ? ` (${this.called(d.sender[next])} on rank ` +
          `${d.ranks[this.rowOf(d.sender[next])]})` : "";
        this.panel.textContent = `${rank} ${CAUSES[cause].name}${from}.${held}`;
        return;
      }
      const a = place.action, before = a > d.first[place.row] ? d.end[a - 1] : d.begin;
      const waited = Math.max(0, d.start[a] - before), sender = d.sender[a];
      let words = `${rank}: ${this.called(a)}, ${seconds(d.start[a] - d.begin)} to ${seconds(d.end[a] - d.begin)}, ` +
        `takes ${seconds(d.end[a] - d.start[a])}.`;
      if (waited > 1e-6 * d.stepTime && sender >= 0) {
        const travel = Math.max(0, Math.min(d.arrived[a], d.start[a]) - Math.max(before, d.end[sender]));
        words += ` Before it the rank waited ${seconds(waited)} for ${this.called(sender)} on rank ` +
          `${d.ranks[this.rowOf(sender)]}` + (travel > 0.01 * waited ? `, ${seconds(travel)} of it for the message.` : ".");
      }
      this.panel.textContent = words + held;
    }
    /** The moment of the cursor in words. */
    moment() {
      const d = /** @type {Data} */ (this.data), time = this.whole.from + Number(this.cursor) * this.whole.length;
      const parts = d.ranks.slice(0, 8).map((rank, row) => {
        const action = this.after(row, time), busy = action < d.first[row + 1] && d.start[action] <= time;
        const micro = busy && d.microbatch[action] >= 0 ? d.microbatch[action] : "";
        const doing = busy ? `${d.kinds[d.kind[action]].letter}${micro}` : "idle";
        return `${rank}: ${doing}${d.memory.length ? ` ${gibi(this.memoryAt(row, time))}` : ""}`;
      });
      return `At ${seconds(time - d.begin)}. Rank ${parts.join(", ")}${d.ranks.length > 8 ? " \u2026" : ""}`;
    }

    // --- drawing --------------------------------------------------------------------------------------------------

    ask() {
      if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
    }

    draw() {
      const d = this.data, canvas = this.canvas;
      if (!d || !this.host.isConnected || !this.host.clientWidth) return;
      const began = performance.now();
      const scale = window.devicePixelRatio || 1, full = this.host.clientWidth;
      canvas.style.width = `${full}px`;
      canvas.style.height = `${this.height}px`;
      canvas.width = Math.round(full * scale);
      canvas.height = Math.round(this.height * scale);
      const c = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
      c.setTransform(scale, 0, 0, scale, 0, 0);
      const dark = document.documentElement.dataset.mantineColorScheme === "dark";
      this.ink = dark ? "#c9c9c9" : "#495057";
      this.rule = dark ? "#4a4a4a" : "#dcdfe3";
      this.paper = dark ? [36, 36, 36] : [255, 255, 255];
      c.clearRect(0, 0, full, this.height);
      c.font = `11px ${getComputedStyle(this.host).fontFamily}`;
      this.axis(c);
      let visible = 0;
      const t0 = this.time(GUTTER), t1 = this.time(GUTTER + this.width);
      for (let row = 0; row < d.ranks.length; row++) visible += this.after(row, t1) - this.after(row, t0) + 1;
      this.isDense = visible > MOST_BARS || visible / d.ranks.length > this.width / 2;
      c.save();
      c.beginPath();
      c.rect(GUTTER, 0, this.width, this.height);
      c.clip();
      if (d.ghost) this.haunt(c, t0, t1);
      if (this.isDense) this.shares(c, scale);
      else for (let row = 0; row < d.ranks.length; row++) this.row(c, row, t0, t1);
      if (this.rowHeight >= 18) for (let row = 0; row < d.ranks.length; row++) this.memoryOf(c, row, t0, t1);
      if (d.lane.length) this.lanes(c, t0, t1);
      if (d.critical) this.path(c, t0, t1);
      if (this.hovered && this.hovered.action >= 0) this.arrows(c, this.hovered);
      if (this.cursor !== null) {
        const x = this.x(this.whole.from + this.cursor * this.whole.length);
        c.fillStyle = `rgba(${this.paper},0.8)`;
        c.fillRect(x, AXIS, GUTTER + this.width - x, this.plotHeight);
        c.fillStyle = this.ink;
        c.fillRect(x, AXIS - 4, 1.5, this.plotHeight + 4);
        this.travel(c, x);
      }
      if (this.pointed !== null) {
        c.fillStyle = this.ink;
        c.fillRect(this.x(this.pointed), AXIS, 1, this.plotHeight);
      }
      c.restore();
      this.minimap(c);
      this.drawnIn = performance.now() - began; // milliseconds
      this.host.dispatchEvent(new Event("drawn"));
    }

    /** @param {CanvasRenderingContext2D} c */
    axis(c) {
      const d = /** @type {Data} */ (this.data), span = (this.view.to - this.view.from) * d.axis;
      const [size, unit] = d.stepTime >= 1 ? [1, "s"] : d.stepTime >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
      const rough = span / Number(size) / Math.max(2, this.width / 110), power = 10 ** Math.floor(Math.log10(rough));
      const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? power;
      const from = (this.view.from * d.axis) / Number(size), to = (this.view.to * d.axis) / Number(size);
      c.textBaseline = "middle";
      c.textAlign = "center";
      const digits = Math.max(0, -Math.floor(Math.log10(tick) + 1e-9));
      for (let n = Math.ceil(from / tick - 1e-9); n * tick <= to + 1e-9; n++) {
        const x = this.x(d.begin + n * tick * Number(size));
        c.fillStyle = this.rule;
        c.fillRect(x, AXIS - 4, 1, this.plotHeight + 4);
        c.fillStyle = this.ink;
        c.fillText(`${(n * tick).toFixed(digits)} ${unit}`, Math.min(Math.max(x, GUTTER + 14), GUTTER + this.width - 14), 10);
      }
      c.textAlign = "right";
      c.fillStyle = this.ink;
      const every = Math.ceil(16 / this.rowHeight);
      d.ranks.forEach((rank, row) => {
        if (row % every === 0) c.fillText(`rank ${rank}`, GUTTER - 8, AXIS + (row + 0.4) * this.rowHeight);
      });
    }

    /** Of the strip of collectives: from the top of a row, pixels. */
    get laneTop() { return this.rowHeight >= 18 ? this.barHeight + 4 : this.rowHeight - this.laneHeight; }
    get laneHeight() {
      return this.rowHeight >= 18 ? Math.min(7, this.rowHeight - this.barHeight - 4) : Math.max(1, Math.floor(this.rowHeight / 3));
    }
    /** What replicas do together, beside the ranks' own actions. @param {CanvasRenderingContext2D} c */
    lanes(c, /** @type {number} */ t0, /** @type {number} */ t1) {
      const d = /** @type {Data} */ (this.data);
      for (let i = 0; i < d.lane.length; i += 5) {
        const [row, kind, , start, end] = d.lane.subarray(i, i + 5);
        if (end < t0 || start > t1) continue;
        const x = this.x(start), width = Math.max(this.x(end) - x, 1), top = AXIS + row * this.rowHeight + this.laneTop;
        c.fillStyle = d.laneKinds[kind].colour;
        c.fillRect(x, top, width > 3 ? width - 0.75 : width, this.laneHeight);
        c.strokeStyle = this.ink; // dark colours are seen on a dark page too
        c.lineWidth = 0.75;
        if (this.laneHeight > 3) c.strokeRect(x, top, width, this.laneHeight);
      }
    }

    get barHeight() { return this.rowHeight >= 18 ? Math.round(this.rowHeight * 0.58) : Math.max(1, this.rowHeight - 1); }

    /** Where the ranks of a pinned plan were busy, behind this one, and its end. @param {CanvasRenderingContext2D} c */
    haunt(c, /** @type {number} */ t0, /** @type {number} */ t1) {
      const d = /** @type {Data} */ (this.data), { busy, stepTime } = /** @type {NonNullable<Data["ghost"]>} */ (d.ghost);
      c.fillStyle = "#8d99ae";
      c.globalAlpha = 0.35;
      for (let i = 0; i + 2 < busy.length; i += 3) {
        if (busy[i] >= d.ranks.length || busy[i + 2] < t0 || busy[i + 1] > t1) continue;
        const x = this.x(busy[i + 1]), top = AXIS + busy[i] * this.rowHeight + 1;
        c.fillRect(x, top, Math.max(this.x(busy[i + 2]) - x, 0.5), this.barHeight);
      }
      c.globalAlpha = 1;
      c.fillRect(this.x(d.begin + stepTime), AXIS, 2, this.plotHeight);
    }

    /** One rank, action by action. @param {CanvasRenderingContext2D} c */
    row(c, /** @type {number} */ row, /** @type {number} */ t0, /** @type {number} */ t1) {
      const d = /** @type {Data} */ (this.data), top = AXIS + row * this.rowHeight + 1, height = this.barHeight;
      const lit = this.hovered && this.hovered.action >= 0 ? d.microbatch[this.hovered.action] : null;
      const last = d.first[row + 1], several = d.stages[row].length > 1;
      const end = d.begin + d.stepTime;
      let from = this.after(row, t0);
      let free = from > d.first[row] ? d.end[from - 1] : d.begin;
      c.textAlign = "center";
      for (let a = from; a < last && free < t1; a++) {
        const start = d.start[a], sender = d.sender[a];
        if (start > free + 1e-9 * d.stepTime) {
          if (this.collects(a, free)) this.hatch(c, 4, free, start, top, height);
          else if (a === d.first[row]) this.hatch(c, 0, free, start, top, height);
          else {
            const sent = sender >= 0 ? Math.min(Math.max(d.end[sender], free), start) : start;
            this.hatch(c, 1, free, sent, top, height);
            this.hatch(c, 2, sent, start, top, height);
          }
        }
        const x = this.x(start), width = Math.max(this.x(d.end[a]) - x, 0.5);
        c.globalAlpha = lit === null || lit < 0 || d.microbatch[a] === lit ? 1 : 0.25;
        c.fillStyle = this.colours[row].get(d.stage[a])?.[d.kind[a]] ?? "#888";
        c.fillRect(x, top, width > 3 ? width - 0.75 : width, height);
        if (width >= 14 && height >= 12 && d.microbatch[a] >= 0) {
          const name = several ? `${d.stage[a]}${d.kinds[d.kind[a]].letter}${d.microbatch[a]}` : `${d.microbatch[a]}`;
          if (width >= 7 * name.length + 2) {
            const [r, g, b] = (c.fillStyle.startsWith("#") ? rgb(c.fillStyle) : [0, 0, 0]);
            c.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
            c.fillText(name, x + width / 2, top + height / 2 + 1);
          }
        }
        c.globalAlpha = 1;
        if (d.sendEnd[a] > d.sendStart[a] && this.rowHeight >= 18) {
          c.fillStyle = "#CC79A7";
          const begun = this.x(d.sendStart[a]);
          c.fillRect(begun, top + height + 1, Math.max(this.x(d.sendEnd[a]) - begun, 1), 2);
        }
        free = Math.max(free, d.end[a]);
      }
      if (free >= d.end[last - 1] - 1e-12) {
        const together = Math.max(d.end[last - 1], this.laneEnd(row));
        this.hatch(c, 4, d.end[last - 1], together, top, height);
        this.hatch(c, 3, together, end, top, height);
      }
    }

    /** @param {CanvasRenderingContext2D} c @param {number} cause @param {number} from @param {number} to */
    hatch(c, cause, from, to, /** @type {number} */ top, /** @type {number} */ height) {
      const x = Math.max(this.x(from), GUTTER), right = Math.min(this.x(to), GUTTER + this.width);
      if (right - x < 0.3) return;
      c.fillStyle = this.pattern(c, cause);
      c.fillRect(x, top, right - x, height);
    }

    /** @param {CanvasRenderingContext2D} c @param {number} cause */
    pattern(c, cause) {
      const dark = this.paper[0] < 128, key = `${cause}${dark}`;
      this.patterns ??= new Map();
      if (!this.patterns.has(key)) {
        const tile = document.createElement("canvas");
        tile.width = tile.height = 8;
        const p = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
        p.strokeStyle = cause === 2 ? "#CC79A7" : cause === 4 ? "#AA4499" : dark ? "#7b7b7b" : "#adb5bd";
        p.lineWidth = 1.2;
        p.beginPath();
        if (cause === 0) { p.moveTo(0, 8); p.lineTo(8, 0); }
        if (cause === 1) { p.moveTo(0, 4); p.lineTo(8, 4); }
        if (cause === 2) { p.moveTo(4, 0); p.lineTo(4, 8); }
        if (cause === 3) { p.moveTo(0, 0); p.lineTo(8, 8); }
        if (cause === 4) { p.moveTo(0, 0); p.lineTo(8, 8); p.moveTo(0, 8); p.lineTo(8, 0); }
        p.stroke();
        this.patterns.set(key, /** @type {CanvasPattern} */ (c.createPattern(tile, "repeat")));
      }
      return this.patterns.get(key);
    }

    /** Busy seconds of each kind up to each action, of all ranks one after the other; made when first needed. */
    prefix() {
      const d = /** @type {Data} */ (this.data);
      if (this.sums) return this.sums;
      const found = d.kinds.map((_, k) => new Float32Array(this.present.includes(k) ? d.kind.length + 1 : 0));
      const total = new Float64Array(d.kinds.length), present = this.present;
      for (let row = 0; row < d.ranks.length; row++) {
        total.fill(0);
        for (let a = d.first[row]; a < d.first[row + 1]; a++) {
          for (const k of present) found[k][a] = total[k];
          total[d.kind[a]] += d.end[a] - d.start[a];
        }
      }
      return (this.sums = found);
    }

    /** Each pixel in the mixture of what its rank does in its time. @param {CanvasRenderingContext2D} c */
    shares(c, /** @type {number} */ scale) {
      const d = /** @type {Data} */ (this.data), width = Math.round(this.width), rows = d.ranks.length, num = d.kinds.length;
      const sums = this.prefix(), image = new ImageData(width, rows), pixels = image.data;
      const colours = d.kinds.map((kind) => rgb(kind.colour)), idle = this.paper[0] < 128 ? [70, 70, 70] : [225, 228, 232];
      const before = new Float64Array(num), now = new Float64Array(num), present = this.present;
      const t0 = this.time(GUTTER), dt = (this.time(GUTTER + this.width) - t0) / width;
      for (let row = 0; row < rows; row++) {
        const last = d.first[row + 1];
        let a = this.after(row, t0);
        const upTo = (/** @type {number} */ t, /** @type {Float64Array} */ into) => {
          if (a < last && d.end[a] <= t) { // gallop, then halve
            let jump = 1;
            while (a + jump < last && d.end[a + jump] <= t) jump *= 2;
            let low = a + (jump >> 1), high = Math.min(a + jump, last);
            while (low < high) {
              const middle = (low + high) >> 1;
              if (d.end[middle] > t) high = middle;
              else low = middle + 1;
            }
            a = low;
          }
          const at = Math.min(a, last - 1);
          for (let i = 0; i < present.length; i++) into[present[i]] = sums[present[i]][at];
          if (a >= last) into[d.kind[at]] += d.end[at] - d.start[at];
          else if (d.start[a] < t) into[d.kind[a]] += t - d.start[a];
        };
        upTo(t0, before);
        for (let x = 0; x < width; x++) {
          upTo(t0 + (x + 1) * dt, now);
          let r = 0, g = 0, b = 0, busy = 0;
          for (let i = 0; i < present.length; i++) {
            const k = present[i], share = (now[k] - before[k]) / dt;
            if (share > 0) { busy += share; r += share * colours[k][0]; g += share * colours[k][1]; b += share * colours[k][2]; }
            before[k] = now[k];
          }
          const rest = Math.max(0, 1 - busy), place = 4 * (row * width + x), over = Math.max(1, busy);
          pixels[place] = r / over + rest * idle[0];
          pixels[place + 1] = g / over + rest * idle[1];
          pixels[place + 2] = b / over + rest * idle[2];
          pixels[place + 3] = 255;
        }
      }
      const small = document.createElement("canvas");
      small.width = width;
      small.height = rows;
      /** @type {CanvasRenderingContext2D} */ (small.getContext("2d")).putImageData(image, 0, 0);
      c.imageSmoothingEnabled = false;
      const height = this.barHeight;
      if (height >= this.rowHeight - 1 && this.rowHeight <= 3)
        c.drawImage(small, 0, 0, width, rows, GUTTER, AXIS, this.width, this.plotHeight);
      else for (let row = 0; row < rows; row++)
        c.drawImage(small, 0, row, width, 1, GUTTER, AXIS + row * this.rowHeight + 1, this.width, height);
    }

    /** A rank's memory under its actions, against its limit. @param {CanvasRenderingContext2D} c */
    memoryOf(c, /** @type {number} */ row, /** @type {number} */ t0, /** @type {number} */ t1) {
      const d = /** @type {Data} */ (this.data);
      if (d.memoryFirst.length < 2) return;
      const bottom = AXIS + (row + 1) * this.rowHeight - 2, together = d.lane.length ? this.laneHeight + 1 : 0;
      const height = this.rowHeight - this.barHeight - 8 - together;
      if (height < 4) return;
      let most = d.limit;
      const from = d.memoryFirst[row], to = d.memoryFirst[row + 1];
      for (let i = from; i < to; i++) if (d.memory[i] > most) most = d.memory[i];
      const y = (/** @type {number} */ b) => bottom - (b / most) * height;
      c.beginPath();
      c.moveTo(GUTTER, bottom);
      let level = y(this.memoryAt(row, t0)), highest = level, px = GUTTER;
      c.lineTo(GUTTER, level);
      let low = from, high = to;
      while (low < high) { const m = (low + high) >> 1; if (d.memoryTime[m] > t0) high = m; else low = m + 1; }
      for (let i = low; i < to && d.memoryTime[i] <= t1; i++) {
        const x = this.x(d.memoryTime[i]);
        highest = Math.min(highest, y(d.memory[i]));
        if (x - px >= 0.7 || i === to - 1) {
          c.lineTo(x, level);
          c.lineTo(x, highest);
          level = highest = y(d.memory[i]);
          c.lineTo(x, level);
          px = x;
        } else level = y(d.memory[i]);
      }
      const end = this.x(Math.min(t1, d.begin + d.stepTime));
      c.lineTo(end, level);
      c.lineTo(end, bottom);
      c.closePath();
      const plain = this.paper[0] < 128 ? "rgba(178,140,205,0.7)" : "rgba(122,81,149,0.55)";
      c.fillStyle = most > d.limit ? "rgba(213,94,0,0.55)" : plain;
      c.fill();
      c.fillStyle = "#D55E00";
      c.fillRect(GUTTER, y(d.limit), end - GUTTER, 1);
    }

    /** @param {CanvasRenderingContext2D} c */
    path(c, /** @type {number} */ t0, /** @type {number} */ t1) {
      const spans = /** @type {Data} */ (this.data).critical ?? new Float32Array(), height = this.barHeight;
      c.strokeStyle = "#D55E00";
      c.lineWidth = this.rowHeight >= 12 ? 2 : 1;
      c.beginPath();
      for (let i = 0; i + 3 < spans.length; i += 4) {
        const [row, where, start, end] = spans.subarray(i, i + 4);
        if (end < t0 || start > t1) continue;
        const top = AXIS + row * this.rowHeight + 1, x = this.x(start), right = this.x(end);
        if (where === 2) c.rect(x, top - 1 + this.laneTop, right - x, this.laneHeight);
        else if (where === 1) {
          const next = i + 4 < spans.length ? spans[i + 4] : row;
          c.moveTo(x, top + height / 2);
          c.lineTo(right, AXIS + next * this.rowHeight + 1 + height / 2);
        } else {
          c.moveTo(x, top);
          c.lineTo(right, top);
          c.moveTo(x, top + height);
          c.lineTo(right, top + height);
        }
      }
      c.stroke();
    }

    /** The micro-batches that are on their way at the cursor. A message is seen for a moment, however fast it is. */
    onTheirWay() {
      const d = /** @type {Data} */ (this.data), now = this.whole.from + Number(this.cursor) * this.whole.length;
      const least = SEEN * this.whole.length, found = [];
      for (let a = 0; a < d.kind.length; a++) {
        const sender = d.sender[a];
        if (sender < 0 || d.end[sender] > now) continue;
        const share = (now - d.end[sender]) / Math.max(d.arrived[a] - d.end[sender] || 0, least);
        if (share > 1) continue;
        const from = this.rowOf(sender), to = this.rowOf(a);
        if (from !== to) found.push({ microbatch: d.microbatch[a], kind: d.kind[sender], from, to, share });
      }
      return found;
    }
    /** @param {CanvasRenderingContext2D} c @param {number} x */
    travel(c, x) {
      if (this.isDense) return;
      const d = /** @type {Data} */ (this.data), middle = AXIS + this.barHeight / 2, radius = this.rowHeight >= 18 ? 9 : 3;
      c.textAlign = "center";
      for (const { microbatch, kind, from, to, share } of this.onTheirWay()) {
        const y = middle + (from + share * (to - from)) * this.rowHeight;
        c.beginPath();
        c.arc(x, y, radius, 0, 2 * Math.PI);
        c.fillStyle = d.kinds[kind].colour;
        c.fill();
        c.strokeStyle = this.ink;
        c.lineWidth = 1;
        c.stroke();
        const [r, g, b] = rgb(d.kinds[kind].colour);
        c.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
        if (radius > 6) c.fillText(`${microbatch}`, x, y + 1);
      }
    }

    /** From what an action waited for to it, and from there back to the first. @param {CanvasRenderingContext2D} c */
    arrows(c, /** @type {Place} */ place) {
      const d = /** @type {Data} */ (this.data), middle = this.barHeight / 2;
      c.strokeStyle = c.fillStyle = this.ink;
      c.lineWidth = 1.5;
      for (let a = place.action, n = 0; d.sender[a] >= 0 && n < 64; a = d.sender[a], n++) {
        const sender = d.sender[a], x = this.x(d.end[sender]), to = this.x(d.start[a]);
        const y = AXIS + this.rowOf(sender) * this.rowHeight + middle, end = AXIS + this.rowOf(a) * this.rowHeight + middle;
        c.beginPath();
        c.moveTo(x, y);
        c.lineTo(to, end);
        c.stroke();
        const angle = Math.atan2(end - y, to - x);
        c.beginPath();
        c.moveTo(to, end);
        c.lineTo(to - 7 * Math.cos(angle - 0.4), end - 7 * Math.sin(angle - 0.4));
        c.lineTo(to - 7 * Math.cos(angle + 0.4), end - 7 * Math.sin(angle + 0.4));
        c.fill();
      }
    }

    /** The whole step in small: how many ranks are busy, and what of it is in view. @param {CanvasRenderingContext2D} c */
    minimap(c) {
      const d = /** @type {Data} */ (this.data), top = AXIS + this.plotHeight + GAP, columns = 240;
      if (!this.map) {
        this.map = new Float64Array(columns);
        const dt = d.axis / columns, every = Math.max(1, Math.floor(d.kind.length / 400000));
        for (let a = 0; a < d.kind.length; a += every) {
          const from = (d.start[a] - d.begin) / dt, to = (d.end[a] - d.begin) / dt;
          for (let i = Math.max(0, Math.floor(from)); i < Math.min(columns, Math.ceil(to)); i++)
            this.map[i] += (every * (Math.min(to, i + 1) - Math.max(from, i))) / d.ranks.length;
        }
      }
      c.fillStyle = this.rule;
      c.fillRect(GUTTER, top, this.width, MINIMAP - 4);
      c.fillStyle = "#0072B2";
      this.map.forEach((busy, i) => {
        const height = Math.min(1, busy) * (MINIMAP - 4), width = this.width / columns;
        c.fillRect(GUTTER + i * width, top + MINIMAP - 4 - height, width + 0.3, height);
      });
      c.fillStyle = `rgba(${this.paper},0.65)`;
      const from = GUTTER + this.view.from * this.width, to = GUTTER + this.view.to * this.width;
      c.fillRect(GUTTER, top, from - GUTTER, MINIMAP - 4);
      c.fillRect(to, top, GUTTER + this.width - to, MINIMAP - 4);
      c.strokeStyle = this.ink;
      c.lineWidth = 1.5;
      c.strokeRect(from + 0.75, top + 0.75, Math.max(to - from - 1.5, 2), MINIMAP - 5.5);
      c.fillStyle = this.ink;
      c.textAlign = "right";
      c.fillText("busy", GUTTER - 8, top + MINIMAP / 2 - 2);
    }
  }

  /** What was in view, by the element's id: an element that is made anew goes on from there. @type {Map<string, any>} */
  const views = new Map();

  function look() {
    for (const host of document.querySelectorAll(".timeline")) {
      const known = /** @type {any} */ (host);
      if (!known.timeline) {
        known.timeline = new Timeline(known);
        known.timeline.view = views.get(known.id) ?? known.timeline.view;
      }
      known.timeline.show(known.dataset.timeline ?? "");
      views.set(known.id, known.timeline.view);
    }
  }
  document.addEventListener("pointerup", () => look());
  document.addEventListener("keyup", () => look());
  const start = () => {
    const own = (/** @type {MutationRecord} */ change) => change.type === "childList" && change.target instanceof Element &&
      change.target.closest(".timeline");
    new MutationObserver((changes) => { if (!changes.every(own)) look(); }).observe(document.body, {
      subtree: true, childList: true, attributes: true, attributeFilter: ["data-timeline"],
    });
    new MutationObserver(() => document.querySelectorAll(".timeline").forEach((host) => {
      /** @type {any} */ (host).timeline?.ask();
    })).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
    look();
  };
  if (document.body) start();
  else addEventListener("DOMContentLoaded", start);
})();
