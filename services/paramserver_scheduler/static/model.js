// One model: how far it is, its charts, its workers, and which shard owns which partition.

import {Chart, color} from "./charts.js";
import {bar, el, pill, show, table} from "./dom.js";
import {NOT_FINITE, age, byName, bytes, duration, fixed, moment, others, percent, seconds, short, unit} from "./format.js";
import {look} from "./nodes.js";
import {ended} from "./runs.js";
import {Series, line} from "./series.js";

const DRAWN_MAX = 10;
const REPORTED_MAX = 6;
const FIRST = ["loss", "accuracy"];
const OWN = ["updates_per_s", "pushes_per_s", "pulls_per_s", "push_p50_s", "push_p99_s", "pull_p50_s", "pull_p99_s",
  "in_bytes_per_s", "out_bytes_per_s"];

/** What the words of the page mean, as tooltips. */
const MEANINGS = {
  __proto__: null,  // a metric may be called like what every object has
  version: "updates applied to the model; each partition counts its own, this is the lowest",
  clock: "iterations finished: of the slowest worker, or in sync of all together",
  "versions/s": "updates applied per second", "pushes/s": "gradients received per second",
  "push p99": "99 of 100 pushes were faster, at the slowest shard, over ten seconds",
  "version lag": "updates applied between a worker's pull and its push, on average",
  "not durable": "newest updates that are in memory only; a snapshot follows within seconds",
};

/** How a reported metric is written: an accuracy in percent. */
const unitOf = name => /accuracy|precision|recall|(^|[^a-z])acc[^a-z]*$/i.test(name) ? "fraction" : "";
const title = name => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");

/** The panel of the model that is looked at. */
export class ModelPanel {
  #model = null;
  #series = null;
  #charts = new Map();
  #reported = [];
  #seen = {};
  #map = "";
  #host = document.getElementById("model-charts");

  /** Look at that model from now on. */
  async choose(model, spanS, nowS) {
    this.#model = model.name;
    this.#reported = reportedNames(model);
    this.#seen = {};
    this.#removeCharts();
    this.#series = new Series({
      metric: [...OWN.map(n => "model." + n), "model.durable_behind", "worker.lag", ...this.#reported.map(n => "reported." + n)],
      model: model.name,
    }, "worker");
    await this.reload(spanS, nowS);
  }

  /** Read the past again: another span, or a connection that had been lost. */
  async reload(spanS, nowS) {
    if (this.#series !== null) await this.#series.load(spanS, nowS).catch(() => {});  // the stream tells of troubles
  }

  /** Show this second. */
  draw(model, runs, nowS, spanS, colors) {
    const names = reportedNames(model);
    if (this.#model !== model.name || names.join() !== this.#reported.join()) this.choose(model, spanS, nowS);
    this.#series.add(nowS, spanS, this.#values(model));
    show(document.getElementById("model-head"), head(model, runs, nowS));
    show(document.getElementById("workers"), workers(model));
    this.#drawPartitions(model, colors);
    this.#drawCharts(model, nowS, spanS);
  }

  /** Nothing to look at. */
  clear() {
    this.#model = null;
    this.#removeCharts();
    for (const id of ["model-head", "workers", "partitions"]) show(document.getElementById(id));
    this.#map = "";
  }

  /** There are thousands, of which none changes in most seconds. */
  #drawPartitions(model, colors) {
    const {shards, owners, loading, moving} = model, looks = shards.map(s => look(colors(s)));
    const map = JSON.stringify([shards, owners, loading, moving, looks]);
    if (map !== this.#map) show(document.getElementById("partitions"), partitions(model, looks));
    this.#map = map;
  }

  #removeCharts() {
    for (const chart of this.#charts.values()) chart.remove();
    this.#charts.clear();
  }

  #values(model) {
    const values = {"model.durable_behind": model.durable_behind};
    for (const name of OWN) values["model." + name] = model[name];
    for (const w of model.workers) if (w.alive) values[line("worker.lag", w.worker)] = w.lag;
    for (const name of this.#reported) {
      if (!Object.hasOwn(model.latest, name)) continue;  // no finite value yet
      const [at, value] = model.latest[name];
      if (this.#seen[name] !== at) values["reported." + name] = value;  // told once, at its time
      this.#seen[name] = at;
    }
    return values;
  }

  #drawCharts(model, nowS, spanS) {
    const from = Math.max(nowS - spanS, this.#series.slot(model.created_s));
    for (const {id, lines, since, more = "", ...options} of this.#panels(model)) {
      if (!this.#charts.has(id)) {
        const chart = new Chart(options);
        this.#charts.set(id, chart);
        this.#host.append(chart.host);
      }
      const drawn = lines.map((l, i) => ({...l, color: color(l.nth ?? i), values: this.#series.of(l.of)}));
      const warning = since === undefined ? "" : `${NOT_FINITE} since ${moment(since, nowS)}`;
      this.#charts.get(id).draw(this.#series.times, drawn, from, nowS, {warning, more});
    }
  }

  #panels(model) {
    const live = new Set(model.workers.filter(w => w.alive).map(w => line("worker.lag", w.worker)));
    const all = this.#series.named("worker.lag").sort((a, b) => live.has(b) - live.has(a) || byName(a, b));
    const lags = all.slice(0, DRAWN_MAX), workers = lags.map(l => l.split("|")[1]);
    const told = new Set(workers.map(runOf)).size > 1 ? w => w : shortWorker;
    const reported = this.#reported.map((name, i) => ({
      id: "reported." + name, title: title(name), unit: unitOf(name), zero: false, gaps: false, since: model.not_finite[name]?.[0],
      lines: [{of: "reported." + name, label: "", nth: name === "accuracy" ? 2 : i}],
    }));
    return [
      ...reported,
      {id: "rates", title: "Rates", unit: "1/s", note: "versions applied, pushes and pulls per second", lines: [
        {of: "model.updates_per_s", label: "versions"}, {of: "model.pushes_per_s", label: "pushes"},
        {of: "model.pulls_per_s", label: "pulls", dash: [4, 3]}]},
      {id: "push", title: "Push time", unit: "s", note: "at the slowest shard, over ten seconds", lines: [
        {of: "model.push_p50_s", label: "p50"}, {of: "model.push_p99_s", label: "p99"}]},
      {id: "pull", title: "Pull time", unit: "s", note: "at the slowest shard, over ten seconds", lines: [
        {of: "model.pull_p50_s", label: "p50"}, {of: "model.pull_p99_s", label: "p99"}]},
      {id: "lag", title: "Version lag", unit: "versions", note: "versions applied between a worker's pull and its push",
        lines: lags.map((l, i) => ({of: l, label: told(workers[i])})), more: others(all.length - lags.length)},
      {id: "bytes", title: "Traffic", unit: "B/s", note: "bytes of gradients and of values, over all shards", lines: [
        {of: "model.in_bytes_per_s", label: "gradients in", nth: 5}, {of: "model.out_bytes_per_s", label: "values out", nth: 6, dash: [4, 3]}]},
      {id: "durable", title: "Not yet durable", unit: "versions", note: "versions that would be lost with their shard",
        lines: [{of: "model.durable_behind", label: "", nth: 4}]},
    ];
  }
}

function reportedNames(model) {
  const rank = n => FIRST.indexOf(n) < 0 ? FIRST.length : FIRST.indexOf(n);
  const names = Object.keys({...model.latest, ...model.not_finite}).filter(n => n !== "lag");  // the shards' own measure is drawn
  return names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)).slice(0, REPORTED_MAX);
}

const notFinite = () => el("span.bad", {}, NOT_FINITE);
const shortWorker = name => name.split("/").at(-1);
const runOf = name => name.split("/")[0];

function head(model, runs, nowS) {
  const run = runs.find(r => r.model === model.name && !ended(r));
  const facts = [
    ["version", fixed(model.version)], ["clock", fixed(model.clock)],
    ...reportedNames(model).map(n => [n, Object.hasOwn(model.not_finite, n) ? notFinite() : unit(unitOf(n))(model.latest[n][1])]),
    ["versions/s", short(model.updates_per_s)], ["pushes/s", short(model.pushes_per_s)],
    ["push p99", seconds(model.push_p99_s)], ["version lag", short(model.lag)], ["not durable", fixed(model.durable_behind)],
  ];
  return [
    el("div.row", {}, el("strong.name", {}, model.name), pill(model.state),
      el("span.dim", {}, [model.mode, model.optimizer + (model.lr === null ? "" : ` lr ${short(model.lr)}`),
        `${short(model.elements)} values in ${model.parameters} parameter${model.parameters === 1 ? "" : "s"} (${bytes(4 * model.elements)})`].join(" · "))),
    run && progress(run),
    ...reportedNames(model).filter(n => Object.hasOwn(model.not_finite, n)).map(n => diverged(n, model, nowS)),
    el("dl.facts", {}, facts.map(([name, value]) => el("div", {title: MEANINGS[name]}, el("dt", {}, name), el("dd.num", {}, value)))),
  ];
}

/** What is wrong with a metric that is no finite number, and what to do. */
function diverged(name, {not_finite, latest}, nowS) {
  const [since, worker] = not_finite[name];
  const says = `${title(name)} is ${NOT_FINITE} since ${moment(since, nowS)}${worker && `, as ${worker} reports`}. `;
  return el("p.diverged", {}, el("span", {role: "alert"}, el("span.bad", {}, says),
    "The training has probably diverged. The model's own values are still finite, as gradients that are not are refused. "
    + "Lower the learning rate (Settings, below) or clip the gradients, and start again from a checkpoint or on a new model."),
    // Of other workers there may be one each second, which must not be read aloud.
    Object.hasOwn(latest, name) && el("span", {}, ` The last number was ${short(latest[name][1])}.`));
}

function progress(run) {
  const parts = [run.placed === run.workers ? `${run.workers} workers` : `${run.placed} of ${run.workers} workers`];
  if (run.stop.minutes) parts.push(`${duration(run.ran_s)} of ${duration(60 * run.stop.minutes)}`);
  else parts.push(duration(run.ran_s));
  if (run.stop.clocks) parts.push(`${fixed(run.clocks)} of ${fixed(run.stop.clocks)} clocks`);
  if (run.stop.metric) {
    const {name, at_least: least, at_most: most} = run.stop.metric;
    parts.push(`until ${name} is ${least === undefined ? "at most " + short(most) : "at least " + short(least)}`);
  }
  return el("div.row.progress", {}, el("span", {}, run.name || run.id), pill(run.state),
    run.progress !== null && bar(run.progress, "wide"), run.progress !== null && el("span.num", {}, percent(run.progress)),
    el("span.dim.num", {}, parts.join(" · ")));
}

function workers(model) {
  if (model.workers.length === 0) return el("p.dim", {}, "No worker has joined this model.");
  const top = Math.max(1, ...model.workers.map(w => w.clock));
  const sorted = [...model.workers].sort((a, b) => byName(a.worker, b.worker));
  return table(["worker", "state", ">clock", "", ">lag", ">loss", ">heartbeat"], sorted.map(w => ({
    key: w.worker, kind: w.alive ? null : "gone",
    cells: [
      w.worker,
      [pill(w.state), model.waiting_for.includes(w.worker) && el("span.pill.warn", {title: "other workers wait for it"}, "waited for")],
      el("span.num", {}, fixed(w.clock)), bar(w.clock / top), short(w.lag), w.metrics.loss === null ? notFinite() : short(w.metrics.loss),
      age(w.heartbeat_age_s),
    ],
  })));
}

function partitions(model, looks) {
  const loading = new Set(model.loading), moving = new Set(model.moving);
  const counts = model.shards.map(() => 0);
  const cells = model.owners.map((owner, i) => {
    if (owner >= 0) counts[owner]++;
    const kind = owner < 0 ? ".orphan" : moving.has(i) ? ".moving" : loading.has(i) ? ".loading" : "";
    const says = owner < 0 ? "no owner" : model.shards[owner] + (kind && `, ${kind.slice(1)}`);
    return el("i.cell" + kind, {title: `partition ${i}: ${says}`, vars: owner < 0 ? {} : looks[owner]});
  });
  const missing = model.owners.filter(o => o < 0).length;
  const places = model.shards.map((s, i) => [s, i]).sort(([a], [b]) => byName(a, b));
  const legend = places.map(([s, i]) => el("span", {vars: looks[i]}, el("i"), `${s} `, el("b", {}, String(counts[i]))));
  return [
    el("div.legend", {}, legend, missing > 0 && el("span.bad", {}, `no owner ${missing}`),
      loading.size > 0 && el("span.warn", {}, `loading ${loading.size}`), moving.size > 0 && el("span.info", {}, `moving ${moving.size}`)),
    el("div.cells" + (cells.length > 256 ? ".many" : ""), {role: "img", "aria-label": "map of the partitions"}, cells),
  ];
}
