// Elements and words. Job, layer and host names come from others: they become text, never markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "use", "rect"]);

export const byId = (id) => document.getElementById(id);
export const first = (selector, within = document) => within.querySelector(selector);

// An element with attributes and children. Absent attributes and children are null, undefined, false or "".
export function el(tag, attributes = {}, ...children) {
  const made = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (is(value)) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter(is));
  return made;
}

const is = (value) => value !== null && value !== undefined && value !== false && value !== "";

export const icon = (name, level = "") =>
  el("svg", { class: `icon ${level}`, "aria-hidden": "true" }, el("use", { href: `#i-${name}` }));

// Gives a parent these children. It updates existing nodes instead of replacing them, so that focus, selection and
// pointer survive; children with a key keep their node when the order changes.
export function render(parent, ...wanted) {
  const nodes = wanted.flat(2).filter(is);
  nodes.forEach((node, at) => {
    const made = typeof node === "string" ? document.createTextNode(node) : node;
    const key = made.dataset?.key;
    let old = parent.childNodes[at];
    if (key && old?.dataset?.key !== key) {
      const moved = [...parent.children].find((child) => child.dataset.key === key);
      if (moved) parent.insertBefore(moved, old);
      else parent.insertBefore(made, old ?? null);
      old = parent.childNodes[at];
    }
    if (!old) parent.append(made);
    else if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName) old.replaceWith(made);
    else if (old !== made) update(old, made);
  });
  while (parent.childNodes.length > nodes.length) parent.lastChild.remove();
}

function update(old, made) {
  if (made.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // the policy forbids the attribute, not the property
    else old.setAttribute(name, value);
  }
  render(old, ...made.childNodes);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Runs `work`, which may move or replace the focused element, then focuses the element with the same key.
export function keepFocus(work) {
  const held = document.activeElement;
  const key = held?.dataset?.key;
  work();
  if (key && document.activeElement !== held) {
    [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key)?.focus({ preventScroll: true });
  }
}

// Numbers as text.
export const known = (value, say) => (value === null || value === undefined || Number.isNaN(value) ? "–" : say(value));
export const whole = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
export const percent = (part) => (part > 0 && part < 0.01 ? "<\u20091%" : `${Math.round(100 * part)}%`);
export function two(value) {
  if (Math.abs(value) >= 10) return whole(value);
  return Math.abs(value) < 1e-9 ? "0" : String(Number(value.toPrecision(2))).replace("-", "\u2212");
}
export const times = (ratio) => (ratio >= 1 ? `${two(ratio)} times` : percent(ratio));
export const duration = (seconds) => (seconds >= 1 ? `${two(seconds)}\u00a0s` : `${two(1000 * seconds)}\u00a0ms`);
export function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)}\u00a0s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)}\u00a0min` : `${Math.round(seconds / 3600)}\u00a0h`;
}
export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB", { hourCycle: "h23" });
export const day = (time) => new Date(1000 * time).toLocaleDateString("en-GB", { day: "numeric", month: "short" });

export const LEVELS = ["ok", "note", "warn", "bad"];

// The headline of a verdict: its text up to the first colon or semicolon, or to the next one after a single word such
// as "Broken".
export function headline({ text, severity }) {
  const [head, next] = text.split(/(?<=[:;]) /);
  const isShort = severity > 1 && next && !head.includes(" ");
  return (isShort ? `${head} ${next}` : head).replace(/[:;]$/, "");
}

// Findings on data that still hold, by rank, except findings of equal data, which no layer shows.
export function skews(group) {
  const found = (group.findings ?? []).filter((one) => one.kind === "skew" && !one.cleared && one.other === undefined);
  return new Map(found.map((one) => [one.rank, one]));
}

export function median(values) {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();
  const half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Numbers that travel as base64 of little-endian float32.
export function floats(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  return new Float32Array(bytes.buffer);
}

// Makes a canvas as wide as its column and `height` pixels high, sharp on any screen; returns its context and width.
export function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth && canvas.clientWidth;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width };
}

export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Requests JSON repeatedly. Requests take up at most a tenth of the time: a map of many ranks takes long to fetch.
export class Source {
  constructor(path) {
    this.path = path;
    this.rests = 0;
  }

  // The view's answer; null if it knows nothing, does not answer, or was asked a moment ago.
  async ask(names) {
    const begun = performance.now();
    const key = JSON.stringify(names);
    if (key === this.key && begun < this.rests) return null;
    [this.key, this.rests] = [key, Infinity]; // until it has answered
    try {
      const answer = await fetch(`${this.path}?${new URLSearchParams(names)}`);
      const found = answer.status === 200 ? await answer.json() : null;
      return key === this.key ? found : null;
    } catch {
      return null; // when the stream of snapshots breaks, the page says that the view does not answer
    } finally {
      if (key === this.key) this.rests = begun + 10 * (performance.now() - begun);
    }
  }
}
