// Values over time for the charts: the past from /status/series, and each second's status after it.

import {get} from "./feed.js";

const POINTS = 300;
/** What was read of the past may end so much later than the status at hand. */
const BACK_S = 10;

/** The name of one line: a metric, and the labels that tell it from others of that metric. */
export const line = (metric, label) => label === undefined ? metric : `${metric}|${label}`;

/** Lines on one grid of times. */
export class Series {
  #query;
  #label;
  #loading = 0;
  times = [];
  lines = new Map();
  stepS = 1;

  /** `query`: metrics and labels for /status/series; `label`: which label tells lines of one metric apart. */
  constructor(query, label) {
    this.#query = query;
    this.#label = label;
  }

  /** Read the last `spanS` seconds; what came meanwhile is in the answer too. */
  async load(spanS, nowS) {
    const loading = ++this.#loading;
    const {metric, ...labels} = this.#query;
    const params = new URLSearchParams({...labels, metric: metric.join(","), from: nowS - spanS, step: Math.ceil(spanS / POINTS)});
    const answer = await get(`status/series?${params}`);
    if (loading !== this.#loading) return;  // another span was asked for since
    this.stepS = answer.step_s;
    this.times = Array.from({length: answer.count}, (_, i) => answer.start_s + i * answer.step_s);
    this.lines = new Map(answer.items.map(i => [line(i.metric, i.labels[this.#label]), i.values]));
  }

  /** Take in the values of this moment, by line; what is older than `spanS` goes. */
  add(nowS, spanS, values) {
    const slot = this.slot(nowS);
    // Of a clock that was set back, what is later than its present is no longer true.
    if (this.times.at(-1) - slot > BACK_S + this.stepS) this.#cut(0, this.times.findIndex(t => t > slot));
    if (this.times.length === 0 || slot > this.times.at(-1)) {
      // Skipped slots stay empty, so that a gap in the news is a gap in the line.
      let next = this.times.length === 0 || slot - this.times.at(-1) > spanS ? slot : this.times.at(-1) + this.stepS;
      for (; next <= slot; next += this.stepS) {
        this.times.push(next);
        for (const known of this.lines.values()) known.push(null);
      }
    }
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined) continue;
      if (!this.lines.has(name)) this.lines.set(name, this.times.map(() => null));
      this.lines.get(name)[this.times.length - 1] = value;
    }
    const old = this.times.findIndex(t => t >= nowS - spanS - this.stepS);
    if (old > 0) this.#cut(old, this.times.length);
  }

  /** Keep that part; lines without a value in it go, as workers and nodes come and go for days. */
  #cut(start, end) {
    this.times = this.times.slice(start, end);
    for (const [name, values] of this.lines) {
      const kept = values.slice(start, end);
      if (kept.some(v => v !== null)) this.lines.set(name, kept);
      else this.lines.delete(name);
    }
  }

  /** The time under which a moment's values are kept; it is before that moment. */
  slot(unixS) { return Math.floor(unixS / this.stepS) * this.stepS; }

  /** The values of a line, one for each time. */
  of(name) { return this.lines.get(name) ?? this.times.map(() => null); }

  /** Names of the lines of a metric that have a value in the span. */
  named(metric) {
    return [...this.lines.keys()].filter(n => n.startsWith(metric + "|") && this.lines.get(n).some(v => v !== null));
  }
}
