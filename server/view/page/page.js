// The page: follows the stream of snapshots, and shows the job that the reader has chosen or that needs attention first.
// All verdicts come from the snapshot; this page renders them and decides nothing.

import { drawCharts } from "./charts.js";
import { LEVELS, byId, clock, el, first, headline, icon, keepFocus, render, setText, span, whole } from "./dom.js";
import { drawEvents } from "./events.js";
import { drawLayers } from "./layers.js";
import { drawRanks } from "./ranks.js";

const ICONS = { healthy: "ok", forming: "wait", waiting: "wait", silent: "wait", broken: "bad", ended: "end" };
const COLOURS = { ok: "#0b7a3e", note: "#6b7480", warn: "#d98200", bad: "#d0202c" };
const SHAPES = {
  ok: '<circle cx="8" cy="8" r="7"/>',
  note: '<path d="M3 8h10" stroke-width="5"/>',
  warn: '<path d="M8 1l7.500 14H.5z"/>',
  bad: '<path d="M1.500 1.500h13v13h-13z"/>',
};
const MARKS = { ok: "\u2713", note: "\u2013", warn: "!", bad: "\u2717" };
const AGAIN_MILLISECONDS = 5000;
const DISMISSED = "statsd_bn dismissed";

const level = (verdict) => LEVELS[verdict.severity] ?? "warn";
const sign = (verdict) => ICONS[verdict.state] ?? (level(verdict) === "bad" ? "bad" : "warn");
const keyOf = (group) => JSON.stringify([group.job, group.group]);

// Most jobs have one group.
const nameOf = (group) => (group.group === "world" ? group.job : `${group.job}, ${group.group}`);

// The headline without durations: they change each second, and a screen reader would read each change.
const brief = (verdict) => headline(verdict).replace(/ (for )?[\d.]+\s(ms|s|min|h)( ago)?\b/g, "");

// An endpoint without its folder.
const short = (endpoint) => endpoint.replace(/^(ipc:\/\/).+(?=\/[^/]+$)/, "$1...");

let snapshot;
let unreachable = "";
let arrived = 0;

// Ended jobs that the reader has dismissed, kept as long as the view keeps the jobs.
const stored = () => {
  try {
    return JSON.parse(localStorage.getItem(DISMISSED)) ?? [];
  } catch {
    return [];
  }
};
const dismissal = (group) => `${keyOf(group)} ${group.over.time}`;

function shownGroups() {
  const dismissed = new Set(stored());
  return snapshot.groups
    .filter((group) => !group.over || !dismissed.has(dismissal(group)))
    .sort((a, b) => b.verdict.severity - a.verdict.severity || (nameOf(a) < nameOf(b) ? -1 : 1));
}

function dismiss(group) {
  const known = snapshot.groups.filter((one) => one.over).map(dismissal);
  const kept = [...stored().filter((one) => known.includes(one)), dismissal(group)];
  localStorage.setItem(DISMISSED, JSON.stringify(kept));
  redraw();
}

function chosen() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // a malformed link
  }
}
const choose = (key) => history.replaceState(null, "", `#${encodeURIComponent(key)}`);

function nothing() {
  const text = `No job yet: one appears here once its ranks connect to ${short(snapshot.endpoint)}`;
  const silent = `The server does not answer: ${snapshot.error}`;
  const verdict = snapshot.error ? { state: "silent", severity: 3, text: silent } : { state: "forming", severity: 1, text };
  return snapshot.verdict ?? verdict;
}

function drawJobs(groups, shown) {
  const isOne = groups.length < 2;
  byId("jobs").hidden = first(".picker").hidden = isOne;
  const items = groups.map((group) => {
    const { verdict } = group;
    const texts = el("span", {}, el("b", {}, nameOf(group)), el("small", { class: level(verdict) }, brief(verdict)));
    const current = group === shown && "true";
    const button = el("button", { type: "button", "aria-current": current, "data-key": keyOf(group) }, icon(sign(verdict), level(verdict)), texts);
    return el("li", { "data-key": `job ${keyOf(group)}` }, button);
  });
  render(byId("jobs"), isOne ? [] : el("ul", {}, items));
  const options = groups.map((group) => el("option", { value: keyOf(group) }, `${MARKS[level(group.verdict)]} ${nameOf(group)}: ${brief(group.verdict)}`));
  render(byId("picker"), isOne ? [] : options);
  if (shown) byId("picker").value = keyOf(shown);
}

// Since when a verdict holds: a time, or the step that the server names and its approximate time.
function begun({ state, step, step_time: then, since, from_start: isFirst }) {
  const time = (at) => `${clock(at)} (${span(Math.max(0, snapshot.time - at))})`;
  // The server compares speeds from half a minute after the first round on.
  const before = isFirst ? ", or in the job's first 30\u00a0s, in which speeds are not compared" : "";
  if (state === "slow" && since) return `since ${isFirst ? "" : "about "}${time(since)}${before}`;
  if (state === "slow") return step && `noticed at step ${whole(step)}`;
  if (state !== "data") return since && `since ${time(since)}`;
  const noticed = since && `noticed ${time(since)}`;
  if (step === null) return noticed;
  return `since step ${whole(step)}${then ? `, about ${time(then)}` : noticed ? `; ${noticed}` : ""}`;
}

function drawBanner(verdict, group) {
  const head = headline(verdict);
  const facts = [];
  const start = begun(verdict);
  if (start) facts.push(start);
  if (group) {
    const present = group.members.filter((member) => !member.is_gone).length + (group.members_left_out || 0);
    facts.push(`${group.over ? "" : `${whole(present)} of `}${whole(group.world_size)} ranks`);
    if (present) facts.push(`step ${whole(Math.max(...group.members.map((member) => member.step)))}`);
  }
  const button = el("button", { type: "button", "data-key": "dismiss" }, "Hide this job");
  const texts = [
    group && el("p", { class: "job" }, nameOf(group)),
    el("h2", {}, el("b", {}, head), verdict.text.slice(head.length)),
    verdict.advice && el("p", { class: "advice" }, verdict.advice),
    (verdict.also ?? []).map((text) => el("p", {}, text)),
  ];
  byId("banner").dataset.level = level(verdict);
  const about = el("div", { class: "facts" }, facts.map((fact) => el("p", {}, fact)), group?.over && button);
  render(byId("banner"), icon(sign(verdict)), el("div", {}, ...texts), about);
}

function drawCards(group) {
  const signs = { good: "ok", watch: "warn", bad: "bad" };
  const cards = group.cards.map((card) => {
    const value = el("p", { class: `value ${signs[card.state] ?? ""}` }, signs[card.state] && icon(signs[card.state]), el("span", {}, card.value));
    return el("div", { class: "card" }, el("h3", {}, card.name), value, card.note && el("p", { class: "note" }, card.note));
  });
  render(byId("cards"), cards);
}

function drawHead(verdict, group) {
  const name = group ? nameOf(group) : "statsd_bn";
  const title = `${MARKS[level(verdict)]} ${name}: ${brief(verdict)}`;
  if (document.title !== title) document.title = title;
  const shape = SHAPES[level(verdict)].replace("/>", ` fill="${COLOURS[level(verdict)]}" stroke="${COLOURS[level(verdict)]}"/>`);
  const picture = `data:image/svg+xml,${encodeURIComponent(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">${shape}</svg>`)}`;
  const link = first("link[rel=icon]");
  if (link.getAttribute("href") !== picture) link.setAttribute("href", picture);
  setText(byId("spoken"), `${name}: ${brief(verdict)}`);
}

function drawLive() {
  const silent = unreachable || snapshot?.error;
  const at = unreachable ? arrived : snapshot?.answered ?? snapshot?.time;
  byId("live").classList.toggle("bad", Boolean(silent));
  if (at) setText(byId("live"), `${silent ? "no answer since" : "live,"} ${clock(at)}`);
  const strip = byId("unreachable");
  if (strip.hidden !== !unreachable) strip.hidden = !unreachable;
  setText(strip, unreachable);
}

function draw() {
  performance.clearMeasures("draw");
  const begun = performance.now();
  keepFocus(() => {
    const groups = shownGroups();
    const group = groups.find((one) => keyOf(one) === chosen()) ?? groups[0];
    const verdict = group?.verdict ?? nothing();
    first("main").toggleAttribute("data-empty", !group);
    first("main").classList.toggle("past", Boolean(group?.over || snapshot.error || unreachable));
    drawJobs(groups, group);
    drawBanner(verdict, group);
    drawHead(verdict, group);
    drawLive();
    setText(byId("server"), `${short(snapshot.endpoint)}, server ${snapshot.server.slice(0, 8)}, up ${span(snapshot.seconds)}`);
    byId("server").title = snapshot.endpoint;
    drawEvents(snapshot, group);
    if (!group) return;
    byId("ranks").hidden = !group.members.length; // a job that ended before this view started has no ranks
    byId("layers").hidden = Boolean(group.over) && !group.has_figures;
    drawCards(group);
    drawRanks(group);
    drawLayers(group, snapshot);
    drawCharts(group, snapshot);
  });
  performance.measure("draw", { start: begun });
}

const redraw = () => snapshot && draw();

// The containers listen for clicks: `render` does not copy listeners to the buttons in them.
byId("jobs").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) choose(button.dataset.key);
  redraw();
});
byId("picker").addEventListener("change", (event) => {
  choose(event.target.value);
  redraw();
});
byId("banner").addEventListener("click", (event) => {
  const groups = shownGroups();
  if (event.target.closest("button")) dismiss(groups.find((one) => keyOf(one) === chosen()) ?? groups[0]);
});
addEventListener("hashchange", redraw);

// Panels send this event: to show more rows, another layer, or new figures.
addEventListener("redraw", redraw);

// A canvas keeps the size and the colours with which it was drawn.
addEventListener("resize", redraw);
for (const media of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
  matchMedia(media).addEventListener("change", redraw);
}

function fail(text) {
  unreachable = text;
  if (snapshot) redraw();
  else drawLive();
}

function follow() {
  const source = new EventSource("events");
  source.onmessage = (message) => {
    [snapshot, unreachable, arrived] = [JSON.parse(message.data), "", Date.now() / 1000];
    draw();
  };
  source.onerror = () => {
    fail("The view does not answer: below is its last state. Start statsd-bn view again, and open the link that it prints.");
    // A browser reconnects by itself after a lost connection, but not after an error status.
    if (source.readyState === EventSource.CLOSED) refused();
  };
}

async function refused() {
  const asked = new AbortController();
  try {
    const answer = await fetch("events", { signal: asked.signal });
    if (!answer.ok) fail(`The view says: ${await answer.text()}`);
  } catch {
    // The view does not answer; the page says so already.
  }
  asked.abort();
  setTimeout(follow, AGAIN_MILLISECONDS);
}

follow();
