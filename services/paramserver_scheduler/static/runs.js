// Runs: the table, the buttons that pause, resume and stop one, and the form that starts one.

import {copyCommands} from "./commands.js";
import {attempt, foldedForm, send} from "./control.js";
import {bar, el, pill, show, table} from "./dom.js";
import {get, list} from "./feed.js";
import {duration, fixed, percent} from "./format.js";
import {SettingsFields, choice, number, pathOf} from "./settings.js";

const ENDED = ["finished", "failed", "stopped"];
const EXAMPLE = "paramserver.examples.digits:train";

/** Whether a run is over. */
export const ended = run => ENDED.includes(run.state);

/** The name that a run was given, which others may have, with its id; without one, its name is its id. */
const full = run => run.name === run.id ? run.id : `${run.name} (${run.id})`;

/** The table of runs with their buttons. */
export class RunTable {
  #host = document.getElementById("runs");
  #said = document.getElementById("runs-said");

  constructor() {
    this.#host.addEventListener("click", e => {
      const {run, name, state} = e.target.dataset;
      if (!run || (state === "stopped" && !confirm(`Stop ${name}? A stopped run cannot be resumed.`))) return;
      attempt(this.#said, this.#host, async () => {
        const now = await send("PATCH", `runs/${encodeURIComponent(run)}`, {state});
        return `${full(now)} is ${now.state}`;
      });
    });
  }

  /** Show this second. */
  draw(runs) {
    if (runs.length === 0) return show(this.#host, el("p.dim", {}, "No run yet."));
    show(this.#host, table(["run", "model", "state", "", ">ran", ">workers", ""], runs.map(r => ({key: r.id, cells: [
      full(r), r.model, pill(r.state),
      r.progress === null ? "" : [bar(r.progress), " ", el("span.num.dim", {}, percent(r.progress))],
      duration(r.ran_s), `${fixed(r.placed)} of ${r.workers}`,
      r.reason || !ended(r) ? [!ended(r) && buttons(r), r.reason && reason(r.reason.trim())] : "",
    ]}))));
  }
}

function buttons(run) {
  const button = (text, state) => el("button", {
    type: "button", "data-run": run.id, "data-name": full(run), "data-state": state, "aria-label": `${text} ${full(run)}`,
  }, text);
  return el("span.row", {}, run.state === "paused" ? button("Resume", "running") : button("Pause", "paused"), button("Stop", "stopped"));
}

/** The last line, which names the error; a traceback is unfolded from it. */
function reason(text) {
  const last = text.split("\n").at(-1);
  return last === text ? el("span.reason.dim", {}, text)
    : el("details.reason.dim", {}, el("summary", {}, last), el("pre", {}, text));
}

/** The folded form for a new run, on a model as it is or on a new one with the same parameters. */
export class RunForm {
  #host = document.getElementById("new-run");
  #form = this.#host.querySelector("form");
  #said = this.#host.querySelector("output");
  #fields = el("div.fields");
  #settings = new SettingsFields();
  #spec = null;

  constructor() {
    this.#form.prepend(this.#fields, this.#settings.host);
    foldedForm(this.#host, () => this.#load(), () => this.#start());
    this.#form.addEventListener("change", e => {
      if (e.target.name === "model") attempt(this.#said, this.#form, () => this.#load(e.target.value));
    });
  }

  /** Fill in what the last run of this model had; if it had none, the function and the end of the last run of all. */
  async #load(chosen) {
    const [models, runs] = await Promise.all([list("models"), list("runs")]);
    const names = models.map(m => m.name);
    const model = chosen ?? runs.find(r => names.includes(r.model))?.model ?? names[0];
    if (model === undefined) return "create a model first";
    this.#spec = (await get(pathOf(model))).spec;
    const last = runs.find(r => r.model === model) ?? runs[0] ?? {entry: EXAMPLE, workers: 1, args: {}, stop: {minutes: 5}};
    const uploaded = Object.keys(this.#spec.params).filter(p => this.#spec.params[p].init.kind === "upload");
    const text = (name, label, value, attributes) => el("label", {}, label, el("input", {name, value, ...attributes}));
    this.#fields.replaceChildren(...[
      choice("model", "model", names, model),
      uploaded.length === 0 && text("fresh", "or a new one like it, named", "", {placeholder: "the model as it is"}),
      text("entry", "function that each worker runs", last.entry, {required: true}),
      text("args", "its arguments (JSON)", JSON.stringify(last.args), {required: true}),
      number("workers", "workers", last.workers, {min: 1, step: 1, required: true}),
      number("minutes", "end after … minutes", last.stop.minutes, {placeholder: "no limit"}),
      number("clocks", "end after … clocks", last.stop.clocks, {placeholder: "no limit", step: 1}),
      ...stopAt(last.stop.metric),
      uploaded.length > 0 && notCopied(model, uploaded),
    ].filter(Boolean));
    this.#settings.show(this.#spec, last.model === model ? last : {});  // another model's settings are not this one's
    this.#form.hidden = false;
    return "";
  }

  async #start() {
    const {model, fresh, entry, args, workers, minutes, clocks, metric, bound, limit} = this.#form.elements;
    const run = {entry: entry.value, args: parsed(args.value), workers: Number(workers.value), stop: {}, model: model.value};
    if (minutes.value) run.stop.minutes = Number(minutes.value);
    if (clocks.value) run.stop.clocks = Number(clocks.value);
    if (!metric.value.trim() !== !limit.value) throw new Error("to end at a metric takes its name and its value");
    if (limit.value) run.stop.metric = {name: metric.value.trim(), [bound.value]: Number(limit.value)};
    const changes = this.#settings.changes();
    if (fresh?.value.trim()) {
      run.model = fresh.value.trim();
      this.#spec = (await send("POST", "models", {...this.#spec, name: run.model})).spec;
      model.append(el("option", {value: run.model}, run.model));  // if a later step fails, trying again goes on from here
      model.value = run.model;
      fresh.value = "";
    }
    const busy = (await list("runs")).find(r => r.model === run.model && !ended(r));
    // Before the settings are changed, which are those of its training.
    if (busy) throw new Error(`run '${busy.id}' is training model '${run.model}'; stop it first`);
    if (Object.keys(changes).length > 0) this.#settings.show((await send("PATCH", pathOf(run.model), changes)).spec);
    const {id, state, reason} = await send("POST", "runs", run);
    return `${id} is ${state}${reason && ": " + reason}`;
  }
}

/** Fields for the metric that ends a run, such as a loss of at most 0.1. */
function stopAt({name = "", at_least: least, at_most: most} = {}) {
  return [
    el("label", {}, "end when the metric", el("input", {name: "metric", value: name, placeholder: "none"})),
    el("label", {}, "is", el("select", {name: "bound"},
      el("option", {value: "at_most"}, "at most"), el("option", {value: "at_least", selected: least !== undefined}, "at least"))),
    number("limit", "its value", least ?? most, {placeholder: "none"}),
  ];
}

/** Why there is no new model like this one, and what to do instead. */
function notCopied(model, uploaded) {
  const names = uploaded.slice(0, 3).join(", ") + (uploaded.length > 3 ? ", …" : "");
  return el("div.note", {}, `A new model like ${model} cannot be made here: a client uploaded the initial values of ${names}, and the `
    + "cluster does not keep them. Run the program that made the model with another name, or copy the model with the values that it "
    + "has now, and choose the copy above:", copyCommands(model, `${model}-2`));
}

function parsed(text) {
  try {
    const found = JSON.parse(text);
    if (found !== null && typeof found === "object" && !Array.isArray(found)) return found;
  } catch {
    // Told below.
  }
  throw new Error('the arguments must be a JSON object, such as {"batch_size": 32}');
}
