// Draws each snapshot that the server sends. Names come from others: they become text, never markup.
"use strict";

const BAD = new Set(["lost", "left", "mismatch", "non-finite", "restart", "silent"]);
const TOLD_EVENTS = 50;
const TOLD_RANKS = 200;

const heats = new Map();

const byId = (id) => document.getElementById(id);

function make(tag, text = "", name = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (name) made.className = name;
  return made;
}

// A number with a bar beside it: the bar alone says nothing to whoever does not see it.
function share(value, most = 1) {
  const cell = make("td", `${value.toFixed(3)} `, "number");
  const bar = make("meter");
  bar.max = most;
  bar.value = value;
  bar.setAttribute("aria-hidden", "true");
  cell.append(bar);
  return cell;
}

function table(label, heads, rows) {
  const scroll = make("div", "", "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", label);
  const drawn = make("table");
  const head = drawn.createTHead().insertRow();
  for (const text of heads) {
    const cell = make("th", text);
    cell.scope = "col";
    head.append(cell);
  }
  drawn.createTBody().append(...rows);
  scroll.append(drawn);
  return scroll;
}

// Median and 99th percentile of what takes seconds; each is the upper bound of its bucket.
function milliseconds(told) {
  return told ? [told.median, told.p99].map((seconds) => (1000 * seconds).toPrecision(2)).join(" / ") : "–";
}

// Nothing is known before the second snapshot.
function rate(perSecond) {
  return perSecond === null ? "–" : perSecond.toFixed(1);
}

function rank(member) {
  const row = make("tr");
  row.dataset.rank = member.member;
  row.append(
    make("td", String(member.member), "number"),
    make("td", member.place),
    make("td", member.participation),
    make("td", String(member.step), "number"),
    make("td", rate(member.steps_per_second), "number"),
    make("td", milliseconds(member.round_trip), "number"),
    make("td", milliseconds(member.late), "number"),
    member.waiting === undefined ? make("td", "–", "number") : share(member.waiting),
    member.score === undefined ? make("td", "–", "number") : share(member.score),
    make("td", member.doing),
  );
  return row;
}

function group(told) {
  const section = make("section");
  const present = told.members.length + (told.members_left_out || 0);
  section.append(make("h2", `Job ${told.job}, group ${told.group}`));
  section.append(
    make(
      "p",
      `epoch ${told.epoch}: ${present} of ${told.world_size} ranks, ${told.rounds_done} rounds, ` +
        `${told.rounds_failed} failed, ${rate(told.rounds_per_second)} rounds/s`,
    ),
  );
  if (told.lost) section.append(make("p", `broken: ${told.lost}`, "bad"));
  for (const text of told.non_finite || []) section.append(make("p", text, "bad"));
  for (const finding of told.findings || []) section.append(make("p", finding.text, "bad"));
  const heads = ["rank", "where", "state", "step", "steps/s", "round trip, ms", "late, ms", "waits, of a minute", "score", "doing"];
  // Each table has a label of its own: by it the reader is found again.
  const label = `Ranks of job ${told.job}, group ${told.group}`;
  section.append(make("h3", "Ranks"), table(label, heads, told.members.slice(0, TOLD_RANKS).map(rank)));
  if (present > TOLD_RANKS) section.append(make("p", `and ${present - TOLD_RANKS} ranks more`));
  return section;
}

function ended(job) {
  const how = job.lost ? `broken: ${job.lost}` : "in good order";
  return make("p", `Job ${job.job} ended ${job.seconds.toFixed(0)} s ago, ${how}`, job.lost ? "bad" : "");
}

function event(told) {
  const item = make("li");
  const at = new Date(told.time * 1000);
  const time = make("time", at.toLocaleTimeString());
  time.dateTime = at.toISOString();
  const of = told.job ? `${told.job}: ` : "";
  item.append(time, make("span", `${told.kind}: ${of}${told.text}`, BAD.has(told.kind) ? "bad" : ""));
  return item;
}

function fail(text) {
  const line = byId("error");
  line.hidden = !text;
  line.className = "bad";
  if (line.textContent !== text) line.textContent = text;
}

// A group keeps its heat map while it is there, so what the reader has scrolled to and opened stays, and also where the
// view had no time to ask for its figures.
function drawHeats(groups) {
  const key = (told) => JSON.stringify([told.job, told.group]);
  const known = new Set(groups.map(key));
  for (const [name, heat] of heats) {
    if (!known.has(name)) {
      heat.end();
      heats.delete(name);
    }
  }
  for (const told of groups) {
    if (!told.has_figures) continue;
    const heat = heats.get(key(told)) || new Heat(told.job, told.group);
    if (!heats.has(key(told))) {
      heats.set(key(told), heat);
      byId("heat").append(heat.section);
    }
    heat.ask();
  }
}

function draw(snapshot) {
  byId("server").textContent =
    `${snapshot.endpoint}, server ${snapshot.server}, up ${snapshot.seconds.toFixed(0)} s, ` +
    `seen ${new Date(snapshot.time * 1000).toLocaleTimeString()}`;
  fail(snapshot.error);
  const held = document.activeElement?.getAttribute("aria-label");
  const places = [...document.querySelectorAll("#jobs .scroll")].map((scroll) => scroll.scrollLeft);
  const jobs = snapshot.groups.length ? snapshot.groups.map(group) : [make("p", "no jobs now")];
  byId("jobs").replaceChildren(...jobs, ...snapshot.ended.map(ended));
  // Each second all is drawn anew; where the reader was, by keyboard or sideways, stays.
  document.querySelectorAll("#jobs .scroll").forEach((scroll, at) => {
    scroll.scrollLeft = places[at] || 0;
    if (held && scroll.getAttribute("aria-label") === held) scroll.focus({ preventScroll: true });
  });
  drawHeats(snapshot.groups);
  byId("timeline").replaceChildren(...snapshot.events.slice(-TOLD_EVENTS).reverse().map(event));
}

// A canvas has its size and its colours from when it was drawn.
const drawCanvases = () => heats.forEach((heat) => heat.draw());
addEventListener("resize", drawCanvases);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCanvases);

const AGAIN_MILLISECONDS = 5000;
let source;

function follow() {
  source = new EventSource("events");
  source.onmessage = (message) => draw(JSON.parse(message.data));
  source.onerror = () => {
    fail("the view does not answer; what you see is its last word");
    // A browser comes again by itself where nobody answers, and never where it was refused.
    if (source.readyState === EventSource.CLOSED) refused();
  };
}

async function refused() {
  const asked = new AbortController();
  try {
    const answer = await fetch("events", { signal: asked.signal });
    if (!answer.ok) fail(`the view says: ${await answer.text()}`);
  } catch {
    // Nobody answers now, as the page says already.
  }
  asked.abort();
  setTimeout(follow, AGAIN_MILLISECONDS);
}

follow();
