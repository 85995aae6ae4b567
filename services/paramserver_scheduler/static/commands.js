// What the page leaves to a terminal, as lines to copy.

import {el} from "./dom.js";
import {byName} from "./format.js";

const url = () => location.origin;

const save = model => `psctl checkpoint save ${model} ./${model} --url ${url()}`;
const restore = (from, name) => `psctl checkpoint restore ${from} --as ${name} --url ${url()}`;
const setBack = model => `psctl checkpoint restore ${model} latest --url ${url()}`;

/** A command with what it is for. */
const line = (purpose, command) => [el("dt", {}, purpose), el("dd", {}, el("code", {}, command))];

/** A line that creates a first model: with the parameters of the function that the form for a new run proposes. */
export function createCommand() {
  const spec = '{"params": {"layers.0.weight": {"shape": [64, 10]}, "layers.0.bias": {"shape": [10]}}}';
  return el("pre", {}, `echo '${spec}' | psctl create demo -f - --url ${url()}`);
}

/** Lines that save, copy, set back and delete a model. */
export const modelCommands = model => el("dl.commands", {},
  line("Save a checkpoint on this machine", save(model)),
  line("Make a new model of it", restore(`./${model}`, `${model}-copy`)),
  line("Go back to the newest checkpoint that the cluster keeps", setBack(model)),
  line("Delete the model", `psctl delete ${model} --url ${url()}`));

/** Lines that change the number of shards. */
export function shardCommands(nodes) {
  const alive = nodes.filter(n => n.role === "shard" && n.alive).map(n => n.name);
  return el("dl.commands", {},
    line("Change the number of shards", `psctl scale shards ${alive.length + 1} --url ${url()}`),
    alive.length > 1 && line("Empty a shard, to stop it", `psctl drain ${alive.sort(byName).at(-1)} --url ${url()}`));
}

/** Lines that copy a model with its present values. */
export const copyCommands = (model, copy) => el("pre", {}, `${save(model)}\n${restore(`./${model}`, copy)}`);
