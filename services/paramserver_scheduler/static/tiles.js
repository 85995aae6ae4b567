// The cluster in six numbers, and what is wrong in words.

import {color, spark} from "./charts.js";
import {el, show} from "./dom.js";
import {bytes, fixed, seconds, short} from "./format.js";
import {stateOf, trafficOf, updatesOf} from "./nodes.js";

const most = values => values.reduce((high, v) => v !== null && (high === null || v > high) ? v : high, null);

/** Draw the tiles; `series` has the cluster's totals over time. */
export function drawTiles({nodes, models, cluster}, series) {
  const shards = nodes.filter(n => n.role === "shard" && n.state !== "left"), alive = shards.filter(n => n.alive);
  const troubled = shards.filter(n => ["dead", "silent", "draining"].includes(stateOf(n)));
  const known = models.flatMap(m => m.workers), workers = known.filter(w => w.alive);
  const gone = known.length > 0 ? `${fixed(known.length)} no longer there` : "none has joined";
  const waited = new Set(models.flatMap(m => m.waiting_for));
  const slow = most(models.map(m => m.push_p99_s)), half = most(models.map(m => m.push_p50_s));
  show(document.getElementById("tiles"),
    tile("Shards alive", `${alive.length} / ${shards.length}`,
      alive.length < shards.length || !alive.length ? "bad" : troubled.length ? "warn" : "good",
      troubled.map(n => `${n.name} ${stateOf(n)}`).join(", ") || (alive.length ? "all responding" : "none has joined")),
    tile("Workers", fixed(workers.length), workers.length ? "good" : "",
      waited.size ? `waiting for ${[...waited].map(w => w.split("/").at(-1)).join(", ")}` : workers.length ? "none is waiting" : gone),
    tile("Versions per second", short(updatesOf(models)), "", null, spark(series.of("cluster.updates_per_s").slice(-120), color(0))),
    tile("Slowest push, p99", seconds(slow), "", half === null ? "no pushes now" : `median ${seconds(half)}`),
    tile("Traffic", `${bytes(trafficOf(models))}/s`, "", null, spark(series.of("cluster.bytes_per_s").slice(-120), color(2))),
    tile("Redis", cluster.redis === "ok" ? "up" : "away", cluster.redis === "ok" ? "good" : "bad",
      models.length ? `${fixed(Math.max(...models.map(m => m.durable_behind)))} versions to store` : ""));
}

function tile(name, value, kind, note, picture = null) {
  return el("div.tile", {}, el("span.dim", {}, name), el(`b.num${kind && "." + kind}`, {}, value), note && el("small.dim", {}, note), picture);
}

const LINES = 5;

/** What is wrong, if anything; the rest of a long list is folded. */
export function drawProblems(problems) {
  show(document.getElementById("problems"), problems.length > 0 && el("section.card.problems", {"aria-label": "Problems"},
    problems.slice(0, LINES).map(p => el("div", {}, p)),
    problems.length > LINES && el("details", {}, el("summary", {}, `${problems.length - LINES} more`),
      problems.slice(LINES).map(p => el("div", {}, p)))));
}
