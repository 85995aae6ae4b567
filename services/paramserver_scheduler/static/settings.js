// A model's settings: fields for them, what was changed in these, and the form that changes them during training.

import {foldedForm, send} from "./control.js";
import {el} from "./dom.js";
import {get} from "./feed.js";

const MODES = {
  async: [],
  ssp: [["staleness", "clocks ahead at most"], ["min_workers", "workers to begin with"]],
  sync: [["quorum", "quorum, fraction of workers"], ["late", "gradients that are late", ["drop", "fold"]], ["min_workers", "workers to begin with"]],
  buffered: [["count", "pushes in a mean"], ["interval_ms", "at most every … ms"]],
};

/** A labeled input of numbers; empty stands for the server's default. */
export const number = (name, label, value, attributes = {}) =>
  el("label", {}, label, el("input", {name, type: "number", step: "any", value, placeholder: "default", ...attributes}));

/** A labeled list to choose from. */
export const choice = (name, label, options, chosen) =>
  el("label", {}, label, el("select", {name}, options.map(o => el("option", {value: o, selected: o === chosen}, o))));

/** Fields for the settings that change most.  Names are paths in the spec. */
export class SettingsFields {
  #spec = null;
  #ofMode = el("div.fields");
  host = el("div.fields");

  constructor() {
    this.host.addEventListener("change", e => {
      if (e.target.name === "consistency.mode") this.#drawMode(e.target.value);
    });
  }

  /** Show the settings of this spec; `run` asked for its own evaluations and checkpoints. */
  show(spec, run = {}) {
    const {optimizer, consistency, checkpoint} = this.#spec = spec;
    this.host.replaceChildren(
      ...("lr" in optimizer ? [number("optimizer.lr", `learning rate (${optimizer.name})`, optimizer.lr)] : []),
      number("evaluate_every", "evaluate every … clocks (0: never)", run.evaluate_every || spec.evaluate_every),
      number("checkpoint.every_clocks", "checkpoint every … clocks (0: never)", run.checkpoint_every || checkpoint.every_clocks),
      choice("consistency.mode", "mode", Object.keys(MODES), consistency.mode), this.#ofMode);
    this.#drawMode(consistency.mode);
  }

  #drawMode(mode) {
    const now = this.#spec.consistency;
    this.#ofMode.replaceChildren(...MODES[mode].map(([name, label, options]) => options
      ? choice(`consistency.${name}`, label, options, now[name]) : number(`consistency.${name}`, label, now[name])));
  }

  /** What differs from the spec, as a JSON merge patch; of a new mode all that is shown, as the server begins it with defaults. */
  changes() {
    const patch = {}, newMode = this.host.querySelector("[name='consistency.mode']").value !== this.#spec.consistency.mode;
    for (const {name, type, value} of this.host.querySelectorAll("input, select")) {
      if (value === "") continue;
      const [last, ...way] = name.split(".").reverse(), wanted = type === "number" ? Number(value) : value;
      const sent = newMode && way[0] === "consistency";
      if (!sent && way.reduce((at, key) => at[key], this.#spec)[last] === wanted) continue;
      way.reduce((at, key) => at[key] ??= {}, patch)[last] = wanted;
    }
    return patch;
  }
}

/** The folded form below the model's numbers.  `pin` keeps a model on the page, even if more goes on in another. */
export class SettingsForm {
  #host = document.getElementById("settings");
  #form = this.#host.querySelector("form");
  #fields = new SettingsFields();
  #model = null;

  constructor(pin) {
    this.#form.prepend(this.#fields.host);
    const load = () => {
      pin(this.#model);
      return this.#load(this.#model);
    };
    foldedForm(this.#host, load, () => this.#save(this.#model));
  }

  /** The settings are those of this model from now on; null for none. */
  choose(model) {
    if (model === this.#model) return;
    this.#model = model;
    this.#host.hidden = model === null;
    this.#host.open = false;
  }

  async #load(model) {
    const {spec} = await get(pathOf(model));
    this.#show(model, spec);
    return "";
  }

  async #save(model) {
    const patch = this.#fields.changes();
    if (Object.keys(patch).length === 0) {
      await this.#load(model);  // a field that was emptied has its value again
      return "nothing was changed";
    }
    const {revision, spec} = await send("PATCH", pathOf(model), patch);
    this.#show(model, spec);
    return `in force within a second, as revision ${revision}`;
  }

  #show(model, spec) {
    if (model !== this.#model) return;  // another one was chosen meanwhile
    this.#fields.show(spec);
    this.#form.hidden = false;
  }
}

/** The path of a model in the API. */
export const pathOf = model => `models/${encodeURIComponent(model)}`;
