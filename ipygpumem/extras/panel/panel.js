// Draws the live panel of ipygpumem: curves of the last two minutes, the running cell, and the largest names.
// The kernel sends rows of figures only when they change, so a curve keeps its value until the next row.
// All text is set as textContent: names are the user's.

const SECONDS = [30, 120]; // shortest and longest time drawn
const WIDTH = 240;
const HEIGHT = 100;
const SERIES = ["used", "reserved", "allocated", "own"]; // from back to front
const LABELS = { used: "used by all", own: "in use" };
const STEPS = { ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 }; // keys, in seconds back in time
const UNITS = [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]];

function bytes(count) {
  const [unit, size, digits] = UNITS.find(([, size]) => count >= 0.99995 * size) ?? UNITS.at(-1);
  return `${(count / size).toFixed(digits)} ${unit}`;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const [hours, minutes, rest] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
}

/** The top of a scale: the next of 1, 1.25, 1.5 or 2 times a power of two MiB above the highest value. */
function scale(highest) {
  const power = 2 ** Math.floor(Math.log2(Math.max(highest, 2 ** 20)));
  return [1, 1.25, 1.5, 2, 2.5].map((factor) => factor * power).find((top) => top >= 1.08 * highest);
}

function make(parent, tag, name = "", text = "") {
  const element = parent.appendChild(document.createElement(tag));
  element.className = name;
  element.textContent = text;
  return element;
}

function draw(parent, name, paths) {
  const svg = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", name);
  svg.setAttribute("role", "img");
  const found = { svg };
  for (const path of paths) {
    found[path] = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
    found[path].setAttribute("class", path);
  }
  return found;
}

/** The steps of a curve, and of the area below it; ``place`` returns the x of a time. */
function steps(points, top, place) {
  let line = "";
  for (const [time, value] of points) {
    const [x, y] = [place(time), (HEIGHT * (1 - value / top)).toFixed(1)];
    line += line ? `H${x}V${y}` : `M${x} ${y}`;
  }
  if (!line) return ["", ""];
  return [`${line}H${WIDTH}`, `${line}H${WIDTH}V${HEIGHT}H${place(points[0][0])}Z`];
}

class Device {
  constructor(parent, name) {
    this.name = name;
    this.block = make(parent, "section", "device");
    this.block.setAttribute("aria-label", `memory of ${name}`);
    const head = make(this.block, "div", "head");
    make(head, "b", "", name);
    this.total = make(head, "span", "faint");
    this.bar = make(this.block, "div", "bar");
    this.bar.setAttribute("aria-hidden", "true"); // the text above says the same
    this.pieces = SERIES.map((series) => make(this.bar, "i", series));
    const chart = make(this.block, "div", "chart");
    this.chart = chart;
    chart.tabIndex = 0; // a slider over time: the arrow keys move it as the pointer does
    chart.setAttribute("role", "slider");
    chart.setAttribute("aria-label", `${name}: memory over time; arrow keys choose a moment`);
    chart.setAttribute("aria-valuemax", "0"); // now; earlier moments are negative
    const lines = SERIES.flatMap((series) => [`area ${series}`, `line ${series}`]);
    this.curves = draw(chart, "curves", ["cells", ...lines, "cursor"]);
    this.top = make(chart, "span", "top faint");
    this.loads = draw(this.block, "loads", ["area load", "line load"]);
    const axis = make(this.block, "div", "axis faint");
    this.start = make(axis, "span");
    make(axis, "span", "", "now");
    this.keys = make(this.block, "div", "keys");
  }

  /** Show the rows of the last ``span`` seconds, and the figures of the one ``at`` seconds ago. */
  show(rows, chosen, now, span, at) {
    const place = (time) => Math.max(0, WIDTH * (1 - (now - time) / span)).toFixed(1);
    const figures = chosen?.devices[this.name] ?? {};
    const total = figures.total;
    const known = SERIES.filter((series) => rows.some((row) => series in (row.devices[this.name] ?? {})));
    const values = (series) => rows
      .filter((row) => series in (row.devices[this.name] ?? {}))
      .map((row) => [row.time, row.devices[this.name][series]]);
    const top = scale(Math.max(...known.flatMap(values).map(([, value]) => value)));
    const share = Math.round((100 * (figures.used ?? figures.own ?? figures.allocated)) / total);
    this.total.textContent = total ? `${share} % of ${bytes(total)}` : "";
    this.start.textContent = `${Math.round(span)} s ago`;
    this.top.textContent = bytes(top).replace(/\.0+ /, " ");
    this.keys.replaceChildren();
    for (const series of known.toReversed()) {
      const key = make(this.keys, "span", `key ${series}`);
      make(key, "span", "", this.name === "RAM" ? "RAM" : (LABELS[series] ?? series));
      make(key, "span", "figure", series in figures ? bytes(figures[series]) : "–");
    }
    for (const series of SERIES) {
      const [line, area] = steps(values(series), top, place);
      this.curves[`line ${series}`].setAttribute("d", line);
      this.curves[`area ${series}`].setAttribute("d", area);
    }
    this.curves.cells.setAttribute("d", bands(rows, now, place));
    this.curves.cursor.setAttribute("d", at === null ? "" : `M${place(now - at)} 0V${HEIGHT}`);
    const sizes = known.toReversed().filter((series) => series in figures);
    const parts = sizes.map((series) => `${LABELS[series] ?? series} ${bytes(figures[series])}`);
    const label = [...parts, this.total.textContent].filter(Boolean).join(", ");
    const moment = at === null ? "now" : `${Math.round(at)} s ago`;
    this.curves.svg.setAttribute("aria-label", `${this.name}: ${label}`);
    this.chart.setAttribute("aria-valuemin", `${-Math.round(span)}`);
    this.chart.setAttribute("aria-valuenow", `${-Math.round(at ?? 0)}`);
    this.chart.setAttribute("aria-valuetext", `${moment}: ${label}`);
    this.pieces.forEach((piece, index) => {
      piece.style.width = total ? `${Math.min(100, (100 * (figures[SERIES[index]] ?? 0)) / total)}%` : "0";
    });
    this.bar.hidden = !total;
    const load = values("load");
    this.loads.svg.toggleAttribute("hidden", !load.length);
    if (!load.length) return;
    const [line, area] = steps(load, 105, place);
    this.loads["line load"].setAttribute("d", line);
    this.loads["area load"].setAttribute("d", area);
    this.loads.svg.setAttribute("aria-label", `${this.name}: utilization ${figures.load ?? "unknown"} %`);
    const key = make(this.keys, "span", "key load");
    make(key, "span", "", "utilization");
    make(key, "span", "figure", "load" in figures ? `${figures.load} %` : "–");
  }
}

/** Rectangles for the times in which cells ran. */
function bands(rows, now, place) {
  return rows
    .map((row, index) => [row, rows[index + 1]?.time ?? now])
    .filter(([row]) => row.cell !== null)
    .map(([row, end]) => `M${place(row.time)} 0H${place(end)}V${HEIGHT}H${place(row.time)}Z`)
    .join("");
}

export default () => {
  const views = new Set(); // functions that draw a view anew
  let rows = [];
  let state = {};
  let offset = 0; // of the kernel's clock

  function take(message) {
    if (!message.rows) return;
    rows = [...rows, ...message.rows].slice(-241);
    state = message.state;
    offset = state.time ? Date.now() / 1000 - state.time : offset;
    for (const show of views) show();
  }

  function initialize({ model }) {
    take(model.get("history") ?? {});
    model.on("msg:custom", (message) => {
      take(message);
      if (message.ask && views.size) model.send({ kind: "views", count: views.size });
    });
  }

  function render({ model, el }) {
    const root = make(el, "div", "ipygpumem-panel");
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "live memory");
    const head = make(root, "header");
    const cell = make(head, "span", "cell");
    const message = make(head, "span", "message faint");
    message.setAttribute("role", "status");
    const free = make(head, "button", "", "Free memory");
    free.title = "Free stored tracebacks, garbage and caches, as %gpumem free does. Your names are kept.";
    free.onclick = () => model.send({ kind: "free", cell: state.cell });
    const close = make(head, "button", "close", "×");
    close.title = "Close the panel";
    close.setAttribute("aria-label", close.title);
    close.onclick = () => model.send({ kind: "close" });
    const grid = make(root, "div", "grid");
    const blocks = make(grid, "div", "devices");
    const devices = new Map();
    const names = make(grid, "section", "names");
    names.setAttribute("aria-label", "largest names");
    let span = SECONDS[0];
    let at = null; // seconds before now under the pointer, or chosen by keyboard
    let listed = null;

    function show() {
      const now = Date.now() / 1000 - offset;
      span = Math.min(SECONDS[1], Math.max(SECONDS[0], now - (rows[0]?.time ?? now)));
      const first = rows.findLastIndex((row) => row.time <= now - span);
      const shown = rows.slice(Math.max(0, first));
      const chosen = at === null ? shown.at(-1) : (shown.findLast((row) => row.time <= now - at) ?? shown[0]);
      for (const name of new Set(shown.flatMap((row) => Object.keys(row.devices)))) {
        if (!devices.has(name)) devices.set(name, new Device(blocks, name));
        devices.get(name).show(shown, chosen, now, span, at);
      }
      const running = state.is_running;
      root.classList.toggle("running", Boolean(running));
      free.disabled = Boolean(running);
      if (at !== null && chosen) {
        cell.textContent = `${duration(at)} ago${chosen.cell === null ? "" : ` · cell ${chosen.cell}`}`;
      } else if (state.cell == null) {
        cell.textContent = "no cell has run";
      } else {
        const seconds = state.seconds + (running ? now - state.time : 0);
        cell.textContent = running
          ? `cell ${state.cell} · running for ${duration(Math.max(1, Math.floor(seconds))).replace(".0 ", " ")}`
          : `cell ${state.cell} · took ${duration(seconds)}`;
      }
      message.textContent = state.message ?? "";
      if (listed !== state.largest) list(state.largest ?? {});
    }

    function list(largest) {
      listed = state.largest;
      names.replaceChildren();
      const rest = largest.names ?? [];
      names.hidden = !rest.length;
      make(make(names, "div", "head"), "b", "", "largest names").parentElement
        .append(make(names, "span", "faint", `after cell ${largest.cell}`));
      const items = make(names, "div", "list");
      items.setAttribute("role", "list");
      for (const { name, size, at_least: isAtLeast, devices: where } of rest) {
        const row = make(items, "div", "name");
        row.setAttribute("role", "listitem");
        const shown = isAtLeast ? `at least ${bytes(size)}` : bytes(size);
        row.title = `${name}: ${shown} in ${where}`;
        make(row, "code", "", name);
        make(row, "span", "faint", where);
        make(row, "span", "figure", shown);
        row.style.setProperty("--share", `${(100 * size) / rest[0].size}%`);
      }
    }

    grid.onpointermove = (event) => {
      const box = event.target.closest(".chart, .loads")?.getBoundingClientRect();
      at = box ? span * Math.min(1, Math.max(0, 1 - (event.clientX - box.left) / box.width)) : null;
      show();
    };
    grid.onpointerleave = () => {
      at = null;
      show();
    };
    grid.onkeydown = (event) => {
      if (!event.target.matches(".chart") || event.altKey || event.ctrlKey || event.metaKey) return;
      const step = STEPS[event.key];
      if (step) at = Math.min(span, Math.max(0, (at ?? 0) + step));
      else if (event.key === "Home") at = span;
      else if (event.key === "End" || event.key === "Escape") at = null;
      else return;
      if (at === 0) at = null;
      event.preventDefault();
      event.stopPropagation(); // else the notebook moves to another cell
      show();
    };
    grid.onfocusout = () => {
      at = null;
      show();
    };
    views.add(show);
    const timer = setInterval(show, 500);
    show();
    model.send({ kind: "views", count: views.size });
    return () => {
      clearInterval(timer);
      views.delete(show);
      model.send({ kind: "views", count: views.size });
    };
  }

  return { initialize, render };
};
