// Every process that is part of the cluster, with what it takes of its machine, and what it did lately.

import {Chart, color, plainColor} from "./charts.js";
import {bar, el, pill, show, table} from "./dom.js";
import {age, byName, bytes, others, short, unit} from "./format.js";
import {Series, line} from "./series.js";

const DRAWN_MAX = 10;
const ROLES = ["scheduler", "shard", "pool"];
const METRICS = ["cpu_cores", "rss_bytes", "in_bytes_per_s", "out_bytes_per_s"];
const TOTALS = ["updates_per_s", "bytes_per_s"];
const rate = unit("B/s");

/** Which color a shard has: its place among all shards. */
export function shardColors(nodes) {
  const names = nodes.filter(n => n.role === "shard").map(n => n.name).sort(byName);
  return name => Math.max(0, names.indexOf(name));
}

const SILENT_S = 2.5;

/** What a node is shown as: one that should have been heard of long ago is silent before it counts as dead. */
export const stateOf = n => n.alive && n.heartbeat_age_s > SILENT_S ? "silent" : n.state;

/** The table of nodes and their charts. */
export class NodePanel {
  series = new Series({metric: [...METRICS.map(m => "node." + m), ...TOTALS.map(m => "cluster." + m)]}, "node");
  #charts = [
    ["cpu_cores", new Chart({title: "Load", unit: "processors", note: "processors kept busy"})],
    ["rss_bytes", new Chart({title: "Memory", unit: "B"})],
    ["in_bytes_per_s", new Chart({title: "Gradients in", unit: "B/s"})],
    ["out_bytes_per_s", new Chart({title: "Values out", unit: "B/s"})],
  ];

  constructor() {
    document.getElementById("node-charts").append(...this.#charts.map(([, chart]) => chart.host));
  }

  /** Read the past. */
  reload(spanS, nowS) { return this.series.load(spanS, nowS).catch(() => {}); }

  /** Show this second. */
  draw({nodes: found, models, cluster}, spanS, colors) {
    const inRole = (a, b) => a.role === "scheduler" ? 0 : byName(a.name, b.name);  // of schedulers the leader is first
    const nodes = [...found].sort((a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || inRole(a, b));
    const values = {
      "cluster.updates_per_s": updatesOf(models),
      "cluster.bytes_per_s": trafficOf(models),
    };
    const drawn = nodes.filter(n => n.role !== "pool");
    for (const n of drawn) for (const m of METRICS) if (n.alive) values[line("node." + m, n.name)] = n[m];
    this.series.add(cluster.now, spanS, values);
    show(document.getElementById("nodes"), rows(nodes, colors));
    const from = Math.max(cluster.now - spanS, this.series.slot(cluster.now - cluster.uptime_s));
    for (const [metric, chart] of this.#charts) {
      const all = drawn.filter(n => n.role === "shard" || !metric.endsWith("_per_s")).sort((a, b) => b.alive - a.alive);
      const names = all.slice(0, DRAWN_MAX);
      chart.draw(this.series.times, names.map(n => ({
        label: n.name, color: nodeColor(n, colors), values: this.series.of(line("node." + metric, n.name)),
      })), from, cluster.now, {more: others(all.length - names.length)});
    }
  }
}

/** Versions and bytes per second of all models together. */
export const updatesOf = models => models.reduce((sum, m) => sum + m.updates_per_s, 0);
export const trafficOf = models => models.reduce((sum, m) => sum + m.in_bytes_per_s + m.out_bytes_per_s, 0);

const nodeColor = (n, colors) => n.role === "shard" ? color(colors(n.name)) : plainColor();

/** CSS variables of the n-th shard's mark: one of ten colors, striped for the next ten. `null`: of what is no shard. */
export const look = nth => nth === null ? {"--c": plainColor()}
  : {"--c": color(nth), ...(nth >= 10 && {"--stripes": `var(--stripes-${Math.floor(nth / 10) % 4})`})};

function rows(nodes, colors) {
  const most = Math.max(1, ...nodes.map(n => n.cpu_cores ?? 0));
  const busiest = Math.max(1, ...nodes.map(n => n.rss_bytes ?? 0));
  const heads = ["node", "role", "state", ">heartbeat", ">load", "", ">memory", "", ">in", ">out", ">partitions", ">parameters", "address"];
  return table(heads, nodes.map(n => ({
    key: n.name, kind: n.alive ? null : "gone",
    cells: [
      el("span.node", {vars: n.role === "pool" ? {} : look(n.role === "shard" ? colors(n.name) : null)}, n.role !== "pool" && el("i"), n.name),
      n.role === "pool" ? "worker" : n.role, pill(stateOf(n)), age(n.heartbeat_age_s),
      n.cpu_cores === null ? "" : short(n.cpu_cores), n.cpu_cores === null ? "" : bar(n.cpu_cores / most),
      n.rss_bytes === null ? "" : bytes(n.rss_bytes),
      n.rss_bytes === null ? "" : bar(n.rss_bytes / (n.memory_limit_bytes ?? busiest), n.memory_limit_bytes ? "" : "soft"),
      n.in_bytes_per_s === null ? "" : rate(n.in_bytes_per_s), n.out_bytes_per_s === null ? "" : rate(n.out_bytes_per_s),
      n.role === "shard" ? String(n.partitions) : "", n.role === "shard" ? bytes(n.bytes) : "",
      n.role === "pool" ? (n.metrics.run ? `${n.metrics.run}, place ${n.metrics.place}` : "") : n.addresses.filter(a => a.startsWith("http")).join(" "),
    ],
  })));
}
