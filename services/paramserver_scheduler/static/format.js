// Numbers, sizes and times as people read them.  A missing value is an en dash.

const NONE = "–";
const known = v => v !== null && v !== undefined && Number.isFinite(v);

/** A number with a fixed number of decimals and separated thousands. */
export function fixed(v, decimals = 0) {
  if (!known(v)) return NONE;
  return v.toLocaleString("en", {minimumFractionDigits: decimals, maximumFractionDigits: decimals});
}

/** About three digits: 0.0123, 1.23, 123, 12.3 k, 1.23 M, 1.23e+20. */
export function short(v) {
  if (!known(v)) return NONE;
  const size = Math.abs(v);
  if (size >= 1e12) return v.toExponential(2);
  if (size >= 1e4) {
    const [unit, name] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${Number((v / unit).toPrecision(3))} ${name}`;
  }
  if (size >= 1000) return fixed(Math.round(v));
  return String(Number(v.toPrecision(3)));
}

/** Bytes in binary units. */
export function bytes(v) {
  if (!known(v)) return NONE;
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(v) >= 1000 && i < names.length - 1) { v /= 1024; i++; }
  return `${i ? Number(v.toPrecision(3)) : Math.round(v)} ${names[i]}`;
}

/** A short time: 850 µs, 12 ms, 1.2 s. */
export function seconds(v) {
  if (!known(v)) return NONE;
  if (v === 0) return "0";
  if (v < 1e-3) return `${Math.round(v * 1e6)} µs`;
  if (v < 1) return `${Number((v * 1e3).toPrecision(v < 0.1 ? 2 : 3))} ms`;
  return `${Number(v.toPrecision(3))} s`;
}

/** A long time: 42 s, 3 min 5 s, 2 h 10 min, 3 d 4 h. */
export function duration(v) {
  if (!known(v)) return NONE;
  const s = Math.round(v);
  if (s < 60) return `${s} s`;
  const two = (big, a, small, b) => small ? `${big} ${a} ${small} ${b}` : `${big} ${a}`;
  if (s < 3600) return two(Math.floor(s / 60), "min", s % 60, "s");
  if (s < 86400) return two(Math.floor(s / 3600), "h", Math.floor(s % 3600 / 60), "min");
  return two(Math.floor(s / 86400), "d", Math.floor(s % 86400 / 3600), "h");
}

/** The age of a heartbeat, which is a second at most when all is well. */
export const age = v => known(v) ? (v < 10 ? `${fixed(v, 1)} s` : duration(v)) : NONE;

/** Order of names in which shard-2 comes before shard-10. */
export const byName = new Intl.Collator("en", {numeric: true}).compare;

/** What a legend says of lines that are not drawn. */
export const others = count => count > 0 ? `and ${fixed(count)} more, not drawn` : "";

/** What stands for a reported value that is no finite number. */
export const NOT_FINITE = "NaN or ∞";

/** A time of day, of Unix seconds. */
export function clock(unix, withSeconds = true) {
  const two = n => String(n).padStart(2, "0");
  const d = new Date(unix * 1000);
  return `${two(d.getHours())}:${two(d.getMinutes())}${withSeconds ? ":" + two(d.getSeconds()) : ""}`;
}

const day = new Intl.DateTimeFormat("en", {day: "numeric", month: "short"});

/** A moment, of Unix seconds: the time of day, with the day if that is not today's. */
export function moment(unix, now) {
  const at = new Date(unix * 1000), today = at.toDateString() === new Date(now * 1000).toDateString();
  return today ? clock(unix) : `${day.format(at)} ${clock(unix)}`;
}

/** A fraction in percent; a number above 1 is in percent already. */
export const percent = v => known(v) ? `${(v > 1 ? v : 100 * v).toFixed(v > 0.9995 && v < 1 ? 2 : 1)} %` : NONE;

const BY_UNIT = {
  "1/s": v => known(v) ? `${short(v)}/s` : NONE,
  "s": seconds,
  "B": bytes,
  "B/s": v => known(v) ? `${bytes(v)}/s` : NONE,
  "fraction": percent,
};

/** A function that writes values of that unit. */
export const unit = name => BY_UNIT[name] ?? short;

/** The same for the marks of an axis, where "per second" need not be said at each. */
export const axis = name => ({"1/s": short, "B/s": bytes})[name] ?? unit(name);
