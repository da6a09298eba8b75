// @ts-check
// One plan, or those in a rectangle, in the heat map, the front and the table at once. Whatever is pointed at in one of
// them is ringed in the others; dragging over a chart keeps the plans in the rectangle, until the next click or Escape.

(() => {
  const CHARTS = ["heatmap", "front"], TABLE = "table", MOVED = 6;
  /** @typedef {{key: string, x: number, y: number, width: number, height: number}} Spot  in pixels of the chart */

  /** @type {Set<string>} */ let kept = new Set();
  /** @type {any} */ (window).dashAgGridFunctions = {
    .../** @type {any} */ (window).dashAgGridFunctions,
    someKept: () => kept.size > 0,
    isKept: (/** @type {any} */ row) => kept.has([row.K, row.M, row.checkpoint].join("/")),
  };

  /** @param {string} name @returns {any} */
  const plot = (name) => document.querySelector(`#${name} .js-plotly-plot`);

  /** Where every plan of a chart is. @param {string} name @returns {Spot[]} */
  function spots(name) {
    const chart = plot(name), layout = chart?._fullLayout;
    if (!layout?.xaxis) return [];
    /** @type {Spot[]} */ const found = [];
    for (const trace of chart.data) {
      const across = layout[(trace.xaxis ?? "x").replace("x", "xaxis")], up = layout[(trace.yaxis ?? "y").replace("y", "yaxis")];
      const place = (/** @type {any} */ axis, /** @type {any} */ value) => axis._offset + axis.c2p(axis.d2c(value));
      if (name === "heatmap") {
        const columns = across._length / across._categories.length, rows = up._length / up._categories.length;
        trace.y.forEach((/** @type {string} */ K, /** @type {number} */ row) => trace.x.forEach((/** @type {string} */ M, /** @type {number} */ column) => {
          if (trace.z[row][column] === null) return;
          const key = [K, M, trace.customdata[row][column]].join("/");
          found.push({ key, x: place(across, M), y: place(up, K), width: columns - 2, height: rows - 2 });
        }));
      } else trace.customdata?.forEach((/** @type {any[]} */ plan, /** @type {number} */ i) => {
        const x = place(across, trace.x[i]), y = place(up, trace.y[i]), [left, top] = [across._offset, up._offset];
        if (x >= left && x <= left + across._length && y >= top && y <= top + up._length)
          found.push({ key: plan.join("/"), x, y, width: 16, height: 16 });
      });
    }
    return found;
  }

  /** Of a row of the table. @param {Element} row */
  const keyOf = (row) => ["K", "M", "checkpoint"].map((name) => row.querySelector(`[col-id=${name}]`)?.textContent).join("/");

  /** A layer over a chart that takes no clicks. @param {any} chart @param {string} kind @returns {HTMLElement} */
  function layer(chart, kind) {
    const known = chart.querySelector(`:scope > .${kind}`);
    if (known) return known;
    const made = Object.assign(document.createElement("div"), { className: `brush ${kind}` });
    chart.append(made);
    return made;
  }
  /** @param {string} kind @param {Spot} spot */
  function box(kind, { x, y, width, height }) {
    const made = Object.assign(document.createElement("div"), { className: kind });
    Object.assign(made.style, { left: `${x - width / 2}px`, top: `${y - height / 2}px`, width: `${width}px`, height: `${height}px` });
    return made;
  }

  /** Ring a plan wherever it is. @param {string | null} key */
  function point(key) {
    for (const name of CHARTS) {
      const chart = plot(name);
      if (!chart) continue;
      const there = key === null ? [] : spots(name).filter((spot) => spot.key === key).slice(0, 1);
      layer(chart, "brush-ring").replaceChildren(...there.map((spot) => box(name === "front" ? "ring round" : "ring", spot)));
    }
    for (const row of document.querySelectorAll(`#${TABLE} .ag-row`)) row.classList.toggle("pointed", keyOf(row) === key);
  }

  /** Keep these plans, and mute all others; none: keep all. @param {Iterable<string>} keys */
  function keep(keys) {
    kept = new Set(keys);
    for (const name of CHARTS) {
      const chart = plot(name);
      if (!chart) continue;
      const all = spots(name), muted = kept.size ? all.filter((spot) => !kept.has(spot.key)) : [];
      layer(chart, "brush-veil").replaceChildren(...muted.map((spot) => box(name === "front" ? "veil round" : "veil", spot)));
    }
    const grid = /** @type {any} */ (window).dash_ag_grid?.getApi(TABLE);
    grid?.onFilterChanged();
    const told = document.getElementById("brushed");
    if (told) told.textContent = kept.size ? `${kept.size} plans in the rectangle; a click or Escape lets them go.` : "";
  }

  /** @type {{name: string, x: number, y: number, moved: boolean} | null} */ let held = null;
  /** In pixels of a chart. @param {string} name @param {PointerEvent} e */
  function at(name, e) {
    const { left, top } = plot(name).getBoundingClientRect();
    return { x: e.clientX - left, y: e.clientY - top };
  }
  const over = (/** @type {Event} */ e) => e.target instanceof Element
    ? CHARTS.find((name) => /** @type {Element} */ (e.target).closest(`#${name} .js-plotly-plot`)) : undefined;

  addEventListener("pointerdown", (e) => {
    const name = over(e);
    if (kept.size && (name || !(e.target instanceof Element && e.target.closest(`#${TABLE}`)))) keep([]);
    if (name && e.button === 0) held = { name, ...at(name, e), moved: false };
  }, true);
  addEventListener("pointermove", (e) => {
    if (held) {
      const here = at(held.name, e), width = Math.abs(here.x - held.x), height = Math.abs(here.y - held.y);
      held.moved ||= Math.max(width, height) > MOVED;
      if (!held.moved) return;
      const middle = { key: "", x: (here.x + held.x) / 2, y: (here.y + held.y) / 2, width, height };
      layer(plot(held.name), "brush-area").replaceChildren(box("area", middle));
      return;
    }
    const name = over(e), row = e.target instanceof Element ? e.target.closest(`#${TABLE} .ag-row`) : null;
    if (row) return point(keyOf(row));
    if (!name) return point(null);
    const here = at(name, e), far = (/** @type {Spot} */ spot) => Math.hypot(spot.x - here.x, spot.y - here.y);
    const near = spots(name).filter((spot) => Math.abs(spot.x - here.x) <= spot.width / 2 && Math.abs(spot.y - here.y) <= spot.height / 2);
    point(near.length ? near.reduce((a, b) => (far(b) < far(a) ? b : a)).key : null);
  }, true);
  addEventListener("pointerup", (e) => {
    if (!held) return;
    const { name, x, y, moved } = held, here = at(name, e);
    held = null;
    layer(plot(name), "brush-area").replaceChildren();
    if (!moved) return;
    plot(name)._dragged = true; // or plotly, which does not drag here, would take it for a click
    const inside = (/** @type {number} */ value, /** @type {number} */ a, /** @type {number} */ b) => value >= Math.min(a, b) && value <= Math.max(a, b);
    keep(spots(name).filter((spot) => inside(spot.x, x, here.x) && inside(spot.y, y, here.y)).map((spot) => spot.key));
  }, true);
  addEventListener("pointercancel", () => (held = null));
  addEventListener("keydown", (e) => { if (e.key === "Escape" && kept.size) keep([]); });
})();
