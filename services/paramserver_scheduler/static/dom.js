// Builds elements, and changes what is on the page into what was built, touching only what differs: a selection, a
// focus or a scroll position outlives the next second.  Text goes in as text, so no name that came over the network is
// ever read as markup.

/** An element: `el("span.dim", {title: "…"}, "text", child)`.  `vars` sets CSS variables, `width` a width in percent. */
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const e = document.createElement(tag);
  if (classes.length) e.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "vars") for (const [k, v] of Object.entries(value)) e.style.setProperty(k, v);
    else if (name === "width") e.style.width = `${Math.max(0, Math.min(100, value))}%`;
    else e.setAttribute(name, value === true ? "" : value);
  }
  add(e, children);
  return e;
}

function add(e, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(e, child);
    else if (child !== null && child !== undefined && child !== false) e.append(child);
  }
}

/** Makes the children of `host` equal to `children`.  Of a list that grows and shrinks each child has a `data-key`. */
export function show(host, ...children) {
  const next = document.createElement("div");
  add(next, children);
  morph(host, next);
}

function morph(from, to) {
  const wanted = [...to.childNodes], keys = new Set(wanted.map(keyOf)), known = new Set([...from.childNodes].map(keyOf));
  let old = from.firstChild;
  for (const want of wanted) {
    // What is gone is removed and what is new is inserted, so that a focused button stays that of its own row.
    while (old !== null && !keys.has(keyOf(old))) old = removed(old);
    if (old === null || !known.has(keyOf(want))) {
      from.insertBefore(want, old);
      continue;
    }
    const following = old.nextSibling;
    if (old.nodeType !== want.nodeType || old.nodeName !== want.nodeName) old.replaceWith(want);
    else if (want.nodeType === Node.TEXT_NODE) {
      if (old.data !== want.data) old.data = want.data;
    } else {
      change(old, want);
      morph(old, want);
    }
    old = following;
  }
  while (old !== null) old = removed(old);
}

/** Text, and elements without a key, are told apart by their place alone. */
const keyOf = node => node.dataset?.key ?? "";

function removed(node) {
  const following = node.nextSibling;
  node.remove();
  return following;
}

/** What the user has unfolded stays so. */
function change(old, want) {
  for (const {name} of [...old.attributes]) {
    if (name !== "style" && name !== "open" && !want.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const {name, value} of want.attributes) {
    // A style attribute would be refused by the page's policy; its object is not.
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== want.style.cssText) old.style.cssText = want.style.cssText;
}

const TONES = {
  active: "good", ready: "good", running: "good", ok: "good", finished: "good", live: "good",
  waiting: "warn", paused: "warn", draining: "warn", silent: "warn", degraded: "warn", initializing: "warn", creating: "warn",
  loading: "warn", resting: "info", idle: "info", stopped: "info", standby: "info", left: "info",
};

/** good, warn, info or bad: how that state is colored. */
export const tone = state => TONES[state] ?? "bad";

/** A state in a colored frame. */
export const pill = state => el(`span.pill.${tone(state)}`, {}, state);

/** A bar filled to that fraction. */
export const bar = (fraction, kind = "") => el(`span.bar${kind && "." + kind}`, {}, el("i", {width: 100 * fraction}));

/** A table of rows {key, cells, kind}; a heading that begins with ">" is of numbers.  On a phone a row is a block of lines. */
export function table(heads, rows) {
  const names = heads.map(h => h.replace(/^>/, ""));
  const right = i => heads[i].startsWith(">") ? "r" : null;
  const cells = row => row.cells.map((c, i) => el("td", {class: right(i), "data-label": names[i]}, c));
  return el("table", {},
    el("thead", {}, el("tr", {}, names.map((n, i) => el("th", {class: right(i), scope: "col"}, n)))),
    el("tbody", {}, rows.map(row => el("tr", {"data-key": row.key, class: row.kind ?? null}, cells(row)))));
}
