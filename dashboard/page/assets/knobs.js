// @ts-check
// Knobs that act while they are dragged, and beneath each the step time over its range. An element of class "spark"
// draws what dashboard/page/ranges.py makes of its knob's range; one element's data-ranges holds all of these curves.
// Whoever drags over one, or drags a slider, asks what the value under the pointer would come to. One question at a
// time: the next is asked when this one is answered.

/**
 * @typedef {Object} Curve
 * @property {string} label
 * @property {[number, number] | null} range  of a slider; others have places of equal width
 * @property {any} now  the value on screen
 * @property {any[]} values
 * @property {string[]} said  the values in words
 * @property {number[]} seconds
 * @property {string[]} times  seconds in words
 * @property {boolean[]} fits
 * @typedef {{knob: string, value: any}} Turn
 */

(() => {
  const HEIGHT = 24, PAD = 4, SVG = "http://www.w3.org/2000/svg";

  // --- what a value would come to ---------------------------------------------------------------------------------

  /** @type {Turn | null} */ let asked = null;
  /** @type {Turn | null} */ let next = null;

  function send() {
    asked = next;
    next = null;
    if (asked) /** @type {any} */ (window).dash_clientside.set_props("dragged", { data: asked });
  }
  /** @param {string} knob @param {any} value */
  function ask(knob, value) {
    next = { knob, value };
    if (!asked) send();
  }
  /** Called by the page when an answer has come. */
  /** @type {any} */ (window).answered = send;

  // --- sliders ----------------------------------------------------------------------------------------------------

  /** @type {string | null} */ let held = null;
  const slider = (/** @type {Element} */ thumb) => thumb.closest(".knob-slider")?.id ?? null;

  new MutationObserver((changes) => {
    for (const { target } of changes) {
      const thumb = /** @type {Element} */ (target);
      if (held && slider(thumb) === held) ask(held, Number(thumb.getAttribute("aria-valuenow")));
    }
  }).observe(document, { subtree: true, attributes: true, attributeFilter: ["aria-valuenow"] });
  addEventListener("pointerdown", (e) => {
    asked = next = null; // whatever was asked before is of another drag
    held = e.target instanceof Element ? slider(e.target) : null;
  }, true);
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (held = null));

  // --- curves -----------------------------------------------------------------------------------------------------

  /** @param {string} kind @param {Record<string, string | number>} looks @param {string} [title] */
  function shape(kind, looks, title) {
    const made = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(looks)) made.setAttribute(name, String(value));
    if (title) made.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: title }));
    return made;
  }

  class Spark {
    /** @param {HTMLElement} host */
    constructor(host) {
      this.host = host;
      this.knob = host.id.replace("spark-", "");
      /** @type {Curve | null} */ this.curve = null;
      /** @type {any} */ this.chosen = null;
      this.dragging = false;
      host.addEventListener("pointerdown", (e) => { this.dragging = true; host.setPointerCapture(e.pointerId); this.at(e); });
      host.addEventListener("pointermove", (e) => { if (this.dragging) this.at(e); });
      host.addEventListener("pointerup", () => this.release());
      host.addEventListener("pointercancel", () => { this.dragging = false; });
      new ResizeObserver(() => this.draw()).observe(host);
    }

    /** @param {Curve | undefined} curve */
    show(curve) {
      this.curve = curve ?? null;
      this.chosen = this.curve?.now ?? null;
      if (this.curve) {
        this.host.setAttribute("role", "img");
        this.host.setAttribute("aria-label", this.curve.label);
      } else for (const name of ["role", "aria-label"]) this.host.removeAttribute(name);
      this.draw();
    }

    /** @param {number} i */
    x(i) {
      const { range, values } = /** @type {Curve} */ (this.curve), width = this.host.clientWidth;
      if (!range) return ((i + 0.5) / values.length) * width;
      return PAD + ((values[i] - range[0]) / (range[1] - range[0])) * (width - 2 * PAD);
    }

    /** @param {PointerEvent} e */
    at(e) {
      if (!this.curve || this.curve.values.length < 2) return;
      const { values } = this.curve, far = values.map((_, i) => Math.abs(this.x(i) - e.offsetX));
      const value = values[far.indexOf(Math.min(...far))];
      if (value === this.chosen) return;
      this.chosen = value;
      this.draw();
      ask(this.knob, value);
    }

    release() {
      if (!this.dragging || !this.curve) return;
      this.dragging = false;
      if (this.chosen === this.curve.now) return;
      const property = typeof this.chosen === "boolean" ? "checked" : "value";
      /** @type {any} */ (window).dash_clientside.set_props(this.knob, { [property]: this.chosen });
    }

    draw() {
      const width = this.host.clientWidth, curve = this.curve;
      if (!curve || curve.values.length < 2 || !width) return this.host.replaceChildren();
      const { values, said, seconds, times, fits, range } = curve;
      const logs = seconds.map(Math.log), low = Math.min(...logs), high = Math.max(...logs, low + 0.02);
      const y = (/** @type {number} */ i) => HEIGHT - PAD - ((logs[i] - low) / (high - low)) * (HEIGHT - 2 * PAD);
      const svg = shape("svg", { width, height: HEIGHT, "aria-hidden": "true" });
      const numbers = values.every((value) => typeof value === "number");
      if (numbers) {
        const points = values.map((_, i) => `${this.x(i)},${y(i)}`).join(" ");
        svg.append(shape("polyline", { points, class: "spark-line" }));
      }
      values.forEach((value, i) => {
        const now = value === this.chosen, title = `${said[i]}: ${times[i]}${fits[i] ? "" : ", does not fit"}`;
        const look = `${fits[i] ? "spark-fits" : "spark-large"}${now ? " spark-now" : ""}`, x = this.x(i);
        if (numbers) svg.append(shape("circle", { cx: x, cy: y(i), r: now ? 4 : 2, class: look }, title));
        else {
          const each = width / values.length, thick = Math.min(each - 2, 28);
          svg.append(shape("rect", { x: x - thick / 2, y: y(i) - 1, width: thick, height: HEIGHT - y(i) + 1, class: look }, title));
        }
        const from = i && range ? (this.x(i - 1) + x) / 2 : 0;
        svg.append(shape("rect", { x: range ? from : x - width / values.length / 2, y: 0, height: HEIGHT,
          width: range ? Math.max(1, 2 * (x - from)) : width / values.length, class: "spark-place" }, title));
      });
      this.host.replaceChildren(svg);
    }
  }

  new MutationObserver(([change]) => {
    const { curves, more } = JSON.parse(/** @type {HTMLElement} */ (change.target).dataset.ranges ?? "{}");
    for (const host of document.querySelectorAll(".spark")) {
      const known = /** @type {any} */ (host);
      known.spark ??= new Spark(known);
      if (!more || known.spark.knob in curves) known.spark.show(curves[known.spark.knob]);
    }
  }).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-ranges"] });
})();
