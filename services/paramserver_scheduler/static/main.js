// The page: follows the cluster's status, and hands each second of it to the panels.

import {createCommand, modelCommands, shardCommands} from "./commands.js";
import {el, show, tone} from "./dom.js";
import {follow} from "./feed.js";
import {clock, duration, moment, short} from "./format.js";
import {ModelPanel} from "./model.js";
import {NodePanel, shardColors} from "./nodes.js";
import {RunForm, RunTable} from "./runs.js";
import {SettingsForm} from "./settings.js";
import {drawProblems, drawTiles} from "./tiles.js";

const SPANS = [["5 min", 300], ["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400]];
const THEMES = ["auto", "dark", "light"];
const TABS_MAX = 8;
const EVENTS = 30;

const $ = id => document.getElementById(id);
/** What the browser keeps for the next time; one that denies storage throws. */
const kept = {
  get: name => permitted(() => localStorage.getItem(`paramserver.${name}`)),
  set: (name, v) => permitted(() => localStorage.setItem(`paramserver.${name}`, v)),
};
const model = new ModelPanel(), nodes = new NodePanel(), runTable = new RunTable(), settings = new SettingsForm(choose);
new RunForm();
let status = null, lost = true, spanS = Number(kept.get("span")) || 900, chosen = location.hash.slice(1), shownLast = null;

function permitted(storage) {
  try {
    return storage();
  } catch {
    return null;
  }
}

function onStatus(found) {
  // Of another version, after an upgrade, this page may not understand it.
  if (status !== null && status.cluster.version !== found.cluster.version) location.reload();
  const back = lost;
  status = found;
  lost = false;
  if (back) reload();
  draw();
}

/** `why`: in the words of the node, if it has answered. */
function onLost(why) {
  lost = true;
  if (document.hidden) return;
  drawState("no answer");
  if (why) drawProblems([why]);
}

/** Read the past again. */
function reload() {
  if (status === null) return;
  Promise.all([model.reload(spanS, status.cluster.now), nodes.reload(spanS, status.cluster.now)]).then(draw);
}

function draw() {
  if (status === null) return;
  const {cluster, models, runs, events} = status, colors = shardColors(status.nodes);
  drawState(lost ? "no answer" : cluster.state);
  drawFacts(cluster);
  drawProblems(cluster.problems);
  nodes.draw(status, spanS, colors);
  drawTiles(status, nodes.series);
  const shown = models.find(m => m.name === chosen) ?? busiest(models, runs);
  const name = shown?.name ?? null;
  if (name !== shownLast) $("model-commands").open = false;
  shownLast = name;
  drawTabs(models, shown);
  $("model").classList.toggle("none", shown === undefined);
  settings.choose(name);
  $("model-commands").hidden = shown === undefined;
  show($("model-commands").querySelector("div"), shown && modelCommands(shown.name));
  show($("shard-commands").querySelector("div"), shardCommands(status.nodes));
  if (shown === undefined) {
    model.clear();
    show($("model-head"), el("div.dim", {}, "No model yet. Create one in a terminal, then start a new run below:", createCommand()));
  } else model.draw(shown, runs, cluster.now, spanS, colors);
  runTable.draw(runs);
  show($("events"), eventRows(events, cluster.now));
}

/** Touched only when it changes: it is read aloud to those who cannot see it. */
function drawState(state) {
  show($("state"), state);
  $("state").className = `pill ${tone(state)}`;
  $("live").classList.toggle("lost", lost);
}

function drawFacts(cluster) {
  $("facts").textContent = `${cluster.version} · up ${duration(cluster.uptime_s)} · term ${cluster.term} · map ${cluster.map_epoch}`;
  $("live").textContent = clock(cluster.now);
}

/** The model that most is going on in: one with a run that runs, else the one pushed to most, else the newest.
 *
 *  Of several with a run, or without, the one shown last stays while anything goes on in it: another one's charts begin anew.
 */
function busiest(models, runs) {
  const running = new Set(runs.filter(r => r.state === "running").map(r => r.model));
  const stays = m => m.name === shownLast && (running.has(m.name) || m.pushes_per_s > 0);
  const rank = m => [running.has(m.name) ? 1 : 0, stays(m) ? 1 : 0, m.pushes_per_s, m.created_s];
  return [...models].sort((a, b) => rank(b).map((v, i) => v - rank(a)[i]).find(d => d !== 0) ?? 0)[0];
}

function drawTabs(models, shown) {
  const named = [...models].sort((a, b) => b.created_s - a.created_s);
  if (named.length <= 1) return show($("models"));
  if (named.length > TABS_MAX) {
    // Options are made only when they differ: a list that is open must not change under the pointer.
    const options = named.map(m => el("option", {value: m.name, selected: m === shown}, m.name));
    show($("models"), el("select", {"aria-label": "model"}, options), el("span.dim", {}, `${named.length} models`));
    const select = $("models").querySelector("select");
    if (select.value !== shown.name) select.value = shown.name;  // of a list that was used, the attribute no longer tells
    return;
  }
  show($("models"), named.map(m => el("button", {
    type: "button", "aria-pressed": String(m === shown), "data-model": m.name, "data-key": m.name,
  },
    el(`i.dot.${tone(m.state)}`), m.name, m.updates_per_s > 0 && el("span.dim.num", {}, ` ${short(m.updates_per_s)}/s`))));
}

function eventRows(events, nowS) {
  if (events.length === 0) return el("p.dim", {}, "No events yet.");
  return el("ul.events", {}, events.slice(0, EVENTS).map(e => el("li", {"data-key": `${e.at} ${e.text}`},
    el("span.dim.num", {}, moment(e.at, nowS)), el(`i.dot.${e.level}`), el("span", {}, e.text))));
}

function setTheme(theme) {
  kept.set("theme", theme);
  $("theme").textContent = `theme: ${theme}`;
  $("theme").value = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  draw();
}

function setSpan(seconds) {
  spanS = seconds;
  kept.set("span", seconds);
  show($("ranges"), SPANS.map(([name, s]) => el("button", {type: "button", "data-span": s, "aria-pressed": String(s === spanS)}, name)));
  reload();
}

function choose(name) {
  chosen = name;
  history.replaceState(null, "", "#" + name);
  draw();
}

$("ranges").addEventListener("click", e => e.target.dataset.span && setSpan(Number(e.target.dataset.span)));
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf($("theme").value) + 1) % THEMES.length]));
$("models").addEventListener("click", e => {
  const tab = e.target.closest("[data-model]");
  if (tab) choose(tab.dataset.model);
});
$("models").addEventListener("change", e => choose(e.target.value));
$("model-commands").addEventListener("toggle", e => e.target.open && choose(shownLast));  // what is copied is of this model
addEventListener("hashchange", () => choose(location.hash.slice(1)));  // a link to another model, opened here
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setTheme(THEMES.includes(kept.get("theme")) ? kept.get("theme") : "auto");
setSpan(spanS);
follow("status/stream", onStatus, onLost);
