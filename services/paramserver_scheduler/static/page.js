"use strict";
// Text reaches the page through textContent only, so no name that came over the network is ever read as markup.
const $ = id => document.getElementById(id);
function el(tag, cls, ...kids) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  for (const k of kids) e.append(k instanceof Node ? k : document.createTextNode(k ?? ""));
  return e;
}
const fix = (v, n = 1) => v == null ? "–" : Number(v).toLocaleString("en", {maximumFractionDigits: n});
function short(v) {
  if (v == null) return "–";
  for (const [n, s] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) if (Math.abs(v) >= n * 10) return fix(v / n) + s;
  return fix(v, 4);
}
const bytes = v => v >= 1048576 ? fix(v / 1048576) + " MiB" : fix(v / 1024) + " KiB";
const span = s => s < 90 ? fix(s) + " s" : s < 5400 ? fix(s / 60) + " min" : fix(s / 3600) + " h";
const tone = s => ({active: "good", ready: "good", running: "good", ok: "good", finished: "good", waiting: "warn",
  paused: "warn", draining: "warn", degraded: "warn", initializing: "warn", creating: "warn", idle: "info"})[s] || "bad";
const pill = s => el("span", "pill " + tone(s), s);

function table(heads, rows) {
  const t = el("table");
  t.append(el("tr", "", ...heads.map(h => el("th", h[0] === ">" ? "r" : "", h.replace(/^>/, "")))));
  for (const cells of rows)
    t.append(el("tr", "", ...cells.map((c, i) => el("td", heads[i][0] === ">" ? "r" : "", c))));
  return el("div", "scroll", t);
}

function spark(s) {
  const ns = "http://www.w3.org/2000/svg", pts = s.points;
  const svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "path");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const xs = pts.map(p => p[0]), ys = pts.map(p => p[1]);
  const x0 = Math.min(...xs), dx = Math.max(...xs) - x0 || 1, y0 = Math.min(...ys), dy = Math.max(...ys) - y0 || 1;
  path.setAttribute("d", pts.map((p, i) =>
    (i ? "L" : "M") + ((p[0] - x0) / dx * 100).toFixed(2) + " " + (96 - (p[1] - y0) / dy * 92).toFixed(2)).join(""));
  svg.append(path);
  return el("div", "chart", el("div", "row", el("span", "dim grow", s.name), el("b", "", short(s.last))), svg);
}

function workers(m) {
  const top = Math.max(1, ...m.workers.map(w => w.clock));
  return table(["worker", ">rank", "clock", "state", ">heartbeat", ">loss", ">lag"], m.workers.map(w => {
    const fill = el("i"), bar = el("span", "bar", fill);
    fill.style.width = (100 * w.clock / top) + "%";
    const name = el("span", "", w.worker);
    if (m.waiting_for.includes(w.worker)) name.append(" ", pill("waiting"));
    return [name, w.rank, el("span", "num", fix(w.clock, 0), bar), pill(w.state), span(w.heartbeat_age_s),
      short(w.metrics.loss), short(w.metrics.lag)];
  }));
}

function model(m) {
  const card = el("div", "card", el("div", "row", el("h3", "", m.name), pill(m.state),
    el("span", "dim", m.mode + " · " + m.optimizer + (m.lr == null ? "" : " · lr " + m.lr)),
    el("span", "dim grow", fix(m.parameters, 0) + " parameters, " + short(m.elements) + " elements in " + m.served + "/" + m.partitions + " partitions"),
    el("span", "num", "version " + fix(m.version, 0)), el("span", "num", "clock " + fix(m.clock, 0)),
    el("span", "num", fix(m.updates_per_s) + " updates/s"), el("span", "num dim", fix(m.pushes_per_s) + " pushes/s"),
    el("span", "num dim", "lag " + fix(m.lag))));
  const drawn = m.series.filter(s => s.points.length > 1);
  if (drawn.length) card.append(el("div", "charts", ...drawn.map(spark)));
  if (m.workers.length) card.append(workers(m));
  return card;
}

function draw(s) {
  const c = s.cluster, out = [];
  $("state").textContent = c.state;
  $("state").className = "pill " + tone(c.state);
  $("facts").textContent = c.version + " · up " + span(c.uptime_s) + " · term " + c.term + " · map epoch " + c.map_epoch + " · Redis " + c.redis;
  $("age").textContent = new Date(c.now * 1000).toLocaleTimeString();
  if (c.problems.length) out.push(el("div", "card warn", ...c.problems.map(p => el("div", "", p))));
  out.push(el("h2", "", "Models"), ...s.models.map(model));
  if (!s.models.length) out.push(el("div", "card dim", "No model yet. Create one:",
    el("pre", "", "curl " + location.origin + "/models --json '{\"name\":\"demo\",\"params\":{\"w\":{\"shape\":[64,10]}}}'")));
  if (s.runs.length) out.push(el("h2", "", "Runs"), el("div", "card", table(["run", "model", "state", ">places", "reason"],
    s.runs.map(r => [r.name || r.id, r.model, pill(r.state), r.placed + "/" + r.workers, r.reason]))));
  out.push(el("h2", "", "Nodes"), el("div", "card", table(["node", "role", "state", ">heartbeat", ">partitions", ">size", "address"],
    s.nodes.map(n => [n.name, n.role, pill(n.state), span(n.heartbeat_age_s), n.partitions, bytes(n.bytes), n.addresses.join(" ")]))));
  if (s.events.length) out.push(el("h2", "", "Events"), el("div", "card", el("ul", "", ...s.events.slice(0, 20).map(e =>
    el("li", "", el("span", "dim num", new Date(e.at * 1000).toLocaleTimeString() + "  "), e.text)))));
  $("main").replaceChildren(...out);
}

async function poll() {
  try {
    const r = await fetch("status", {headers: {accept: "application/json"}, cache: "no-store"});
    if (!r.ok) throw new Error("HTTP " + r.status);
    draw(await r.json());
  } catch (e) {
    $("state").textContent = "unreachable";
    $("state").className = "pill bad";
  }
  setTimeout(poll, 1000);
}
poll();
