// One panel with lines over time, drawn by uPlot; the cursor is the same in all of them.

/* global uPlot */
import {axis, clock, unit} from "./format.js";
import {el, show} from "./dom.js";

const HEIGHT = 150;
const TIMES_S = [1, 2, 5, 10, 15, 30].flatMap(n => [n, 60 * n]).concat([3600, 7200, 10800, 21600, 43200, 86400]).sort((a, b) => a - b);
/** In a large cluster a status may take some seconds to come: a line goes on over a gap that is not longer. */
const GAP_S = 8;
const POWERS = Array.from({length: 46}, (_, i) => 2 ** i);

/** The n-th color of lines, shards and partitions. */
export const color = n => style(`--c${((n % 10) + 10) % 10}`);

/** The color of what is no shard. */
export const plainColor = () => style("--text");

const probe = document.createElement("span");

/** What a color of the style sheet is in the present theme; a canvas takes no CSS variables. */
function style(name) {
  if (!probe.isConnected) document.head.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** A panel.  `zero`: the scale begins at 0. `gaps`: a line is not drawn over missing values. */
export class Chart {
  #plot = null;
  #drawn = "";
  #lines = [];
  #span = [0, 1];
  #fresh = 1;
  #warning = "";
  #more = "";
  #format;
  #options;
  #watch;

  constructor({title, unit: of = "", zero = true, gaps = true, note = ""}) {
    this.#options = {zero, gaps, of};
    this.#format = unit(of);
    this.legend = el("span.legend");
    this.value = el("span.num");
    this.canvas = el("div.plot");
    this.host = el("figure.chart", {title: note || null, "aria-label": title},
      el("figcaption", {}, el("b", {}, title), this.value), this.canvas, this.legend);
    this.#watch = new ResizeObserver(() => this.#resize());
    this.#watch.observe(this.canvas);
  }

  /** Draw these lines ({label, color, values, dash}) from and to Unix seconds; `warning` replaces the newest value, `more` ends the legend. */
  draw(times, lines, from, to, {warning = "", more = ""} = {}) {
    this.#warning = warning;
    this.#more = more;
    this.#span = [from, Math.max(to, from + 5)];
    this.#lines = lines;
    this.#fresh = times.at(-1) - times.at(-2) > GAP_S ? 1 : 3;  // among how many of the newest values one is of now
    const kind = JSON.stringify(lines.map(l => [l.label, l.color, l.dash])) + style("--line");
    if (this.#plot === null || kind !== this.#drawn) this.#build(times, kind);
    else this.#plot.setData([times, ...lines.map(l => l.values)]);
    this.canvas.classList.toggle("empty", !lines.some(l => l.values.some(v => v !== null)));
    this.#tell();
  }

  /** It is gone from the page. */
  remove() {
    this.#watch.disconnect();
    this.#plot?.destroy();
    this.host.remove();
  }

  #build(times, kind) {
    this.#plot?.destroy();
    this.#drawn = kind;
    const dim = style("--dim"), grid = {stroke: style("--line"), width: 1}, font = "11px system-ui, sans-serif";
    const {zero, gaps, of} = this.#options, written = axis(of);
    const options = {
      width: Math.max(80, this.canvas.clientWidth), height: HEIGHT, padding: [8, 22, 0, 0],
      legend: {show: false},
      cursor: {sync: {key: "page"}, drag: {x: false, y: false}, y: false, points: {size: 6}},
      scales: {
        x: {time: true, range: () => this.#span},
        y: {range: (_, low, high) => spread(low, high, zero, of === "fraction" ? 1 : Infinity)},
      },
      axes: [
        {stroke: dim, grid: {...grid, show: false}, ticks: {show: false}, size: 22, font, space: 56, incrs: TIMES_S,
          values: (_, at, _axis, _space, step) => at.map(t => clock(t, step < 60))},
        {stroke: dim, grid, ticks: {show: false}, size: 58, font, space: 34, values: (_, at) => at.map(written),
          ...(of.startsWith("B") ? {incrs: POWERS} : {})},
      ],
      series: [{}, ...this.#lines.map(l => ({
        label: l.label, stroke: l.color, width: 1.6, dash: l.dash, spanGaps: !gaps, gaps: long,
        points: {show: (u, i) => single(u.data[i], gaps), size: 4, fill: l.color},
        fill: this.#lines.length === 1 ? l.color.replace("rgb(", "rgba(").replace(")", ", 0.12)") : undefined,
      }))],
      hooks: {setCursor: [() => this.#tell()]},
    };
    this.#plot = new uPlot(options, [times, ...this.#lines.map(l => l.values)], this.canvas);
  }

  /** The value under the cursor, or the newest: of a single line beside the title, of several in the legend. */
  #tell() {
    const at = this.#plot?.cursor.idx ?? null;
    const said = l => this.#format(at === null ? newest(l.values, this.#options.gaps ? this.#fresh : l.values.length) : l.values[at]);
    const one = this.#lines.length === 1 && !this.#lines[0].label;
    const warns = this.#warning && at === null;
    show(this.value, warns ? el("span.bad", {}, this.#warning) : one && said(this.#lines[0]));
    show(this.legend, !one && this.#lines.map(l => el("span", {vars: {"--c": l.color}}, el("i"), l.label + " ", el("b", {}, said(l)))),
      this.#more && el("span", {}, this.#more));
  }

  #resize() {
    const width = this.canvas.clientWidth;
    if (this.#plot !== null && width > 0 && width !== this.#plot.width) this.#plot.setSize({width, height: HEIGHT});
  }
}

/** Those of the gaps, in pixels, that are long in time. */
function long(plot, _line, _from, _to, gaps) {
  const start = plot.scales.x.min, pixels = plot.valToPos(start + GAP_S, "x", true) - plot.valToPos(start, "x", true);
  return gaps.filter(([from, to]) => to - from > pixels);
}

/** Points are drawn only where a line of one value would be invisible. */
function single(values, gaps) {
  const count = values.reduce((n, v) => n + (v !== null), 0);
  return count > 0 && (count === 1 || (!gaps && count < 12));
}

/** The last value, if it is among the last `places`: what ended before that has none now. */
function newest(values, places) {
  for (let i = values.length - 1; i >= Math.max(0, values.length - places); i--) if (values[i] !== null) return values[i];
  return null;
}

/** The scale for values from `low` to `high`; unless these are above `most`, it is not.
 *
 *  Equal values differ in their last digits, as they are means.
 */
export function spread(low, high, zero, most = Infinity) {
  if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
  if (zero) return [Math.min(0, low), high > 0 ? high * 1.1 : 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const pad = high - low > 1e-9 * size ? (high - low) * 0.08 : size * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high > most ? high + pad : Math.min(most, high + pad)];
}

/** A small line without axes for a tile, as an SVG. */
export function spark(values, stroke) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "path");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  values = values.slice(Math.max(0, values.findIndex(v => v !== null)));
  const high = Math.max(...values.map(v => v ?? 0)) || 1, n = Math.max(1, values.length - 1);
  let d = "", pen = "M", missing = 0;
  values.forEach((v, i) => {
    missing = v === null ? missing + 1 : 0;
    if (missing > GAP_S) pen = "M";
    if (v === null) return;
    d += `${pen}${(100 * i / n).toFixed(1)} ${(96 - 90 * v / high).toFixed(1)}`;
    pen = "L";
  });
  path.setAttribute("d", d || "M0 96");
  path.style.stroke = stroke;
  svg.append(path);
  return svg;
}
