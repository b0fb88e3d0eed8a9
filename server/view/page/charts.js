// The last ten minutes: speed and round trip of the job, and mean and variance of the shown layer by rank.

import { Source, clock, colours, duration, el, first, floats, known, render, setText, sized, skews, two } from "./dom.js";
import { shownLayer } from "./layers.js";

const HEIGHT = 84;

// Above this number of ranks their range is drawn instead of a line for each.
const MANY = 64;

const source = new Source("history");
const shown = { key: "", past: null, at: null };
const charts = new Map();

class Chart {
  constructor(name) {
    this.canvas = el("canvas", { role: "img", "aria-label": name });
    this.title = el("figcaption");
    this.scale = el("div", { class: "scale", "aria-hidden": "true" });
    this.ends = el("div", { class: "ends", "aria-hidden": "true" });
    this.node = el("figure", {}, this.title, el("div", { class: "plot" }, this.scale, this.canvas, this.ends));
    this.canvas.onpointermove = (event) => {
      const box = this.canvas.getBoundingClientRect();
      shown.at = (event.clientX - box.left) / box.width;
      dispatchEvent(new Event("redraw"));
    };
    this.canvas.onpointerleave = () => {
      shown.at = null;
      dispatchEvent(new Event("redraw"));
    };
    first("#time .charts").append(this.node);
  }

  // Lines have values, perhaps a kind (area or odd) and perhaps a label at their end; `format` returns a value with
  // its unit as text, and `describe` the text of all lines' values at an index.
  draw({ title, seconds, lines, format, describe, low, high, from, to, marks, when = clock }) {
    const { pen, width } = sized(this.canvas, HEIGHT);
    const { mark, hot, line, ink, soft, wash } = colours("mark", "hot", "line", "ink", "soft", "wash");
    pen.lineCap = "round";
    const x = (time) => ((time - from) / (to - from || 1)) * width;
    const y = (value) => HEIGHT - 3 - ((value - low) / (high - low || 1)) * (HEIGHT - 8);
    pen.fillStyle = line;
    pen.fillRect(0, HEIGHT - 1, width, 1);
    for (const { values, kind } of lines) {
      const points = seconds.map((time, at) => [x(time), y(values[at])]);
      if (kind === "area" && points.length) {
        pen.fillStyle = wash;
        pen.beginPath();
        for (const [across, down] of [[points[0][0], HEIGHT - 1], ...points, [points.at(-1)[0], HEIGHT - 1]]) pen.lineTo(across, down);
        pen.fill();
      }
      pen.strokeStyle = kind === "odd" ? hot : mark;
      pen.lineWidth = kind === "odd" ? 2.5 : 1.3;
      stroke(pen, points);
      pen.fillStyle = pen.strokeStyle;
      if (points.length === 1) pen.fillRect(points[0][0], points[0][1] - 1.5, 6, 3); // one point makes no visible line
    }
    pen.lineWidth = 1;
    pen.strokeStyle = soft;
    pen.setLineDash([2, 3]);
    for (const time of marks) stroke(pen, [[x(time), 0], [x(time), HEIGHT]]);
    pen.setLineDash([]);
    const isPointed = shown.at !== null && seconds.length > 0;
    const latest = seconds.findLastIndex((_, place) => lines.some(({ values }) => Number.isFinite(values[place])));
    const at = isPointed ? nearest(seconds, from + shown.at * (to - from)) : Math.max(0, latest);
    pen.strokeStyle = ink;
    if (isPointed) stroke(pen, [[x(seconds[at]), 0], [x(seconds[at]), HEIGHT]]);
    const reading = seconds.length ? `${(isPointed ? clock : when)(Math.min(to, seconds[at]))}: ${describe(at)}` : "no figures yet";
    render(this.title, el("span", {}, title), el("b", {}, reading));
    render(this.scale, el("span", {}, format(high)), el("span", {}, format(low)));
    render(this.ends, ends(lines, y));
    this.canvas.setAttribute("aria-label", `${textOf(title)}, from ${format(low)} to ${format(high)}: ${reading}`);
  }
}

// Labels at the ends of lines, moved apart where they would overlap.
function ends(lines, y) {
  const named = lines.filter((one) => one.label && one.values.length).map((one) => ({ ...one, top: y([...one.values].findLast(Number.isFinite)) }));
  named.sort((a, b) => a.top - b.top);
  let last = -Infinity;
  return named.filter(({ top }) => Number.isFinite(top)).map(({ label, kind, top }) => {
    const made = el("span", { class: kind === "odd" && "odd" }, label);
    last = Math.min(HEIGHT, Math.max(14, top, last + 14));
    made.style.top = `${last}px`;
    return made;
  });
}

const textOf = (title) => (typeof title === "string" ? title : title.map((part) => part.textContent ?? part).join(""));

function stroke(pen, points) {
  pen.beginPath();
  let isDown = false;
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) isDown = false;
    else if (isDown) pen.lineTo(x, y);
    else {
      pen.moveTo(x, y);
      pen.lineTo(x, y); // a sample alone is a dot
      isDown = true;
    }
  }
  pen.stroke();
}

function nearest(seconds, time) {
  let best = 0;
  seconds.forEach((one, at) => {
    if (Math.abs(one - time) < Math.abs(seconds[best] - time)) best = at;
  });
  return best;
}

function chart(name) {
  if (!charts.has(name)) charts.set(name, new Chart(name));
  return charts.get(name);
}

// The largest and smallest value without spreading a long list over the arguments of a call.
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);

export async function drawCharts(group, snapshot) {
  const layer = shownLayer();
  const key = JSON.stringify([group.job, group.group, layer]);
  if (key !== shown.key) Object.assign(shown, { key, past: null });
  draw(group, snapshot, layer);
  if (!layer || (shown.past && (snapshot.error || group.over))) return;
  const answer = await source.ask({ job: group.job, group: group.group, layer });
  if (!answer || key !== shown.key) return;
  shown.past = { ...answer, means: floats(answer.means), variances: floats(answer.variances) };
  draw(group, snapshot, layer);
}

function draw(group, snapshot, layer) {
  const trend = group.trend ?? { seconds: [], rounds_per_second: [], median: [], p99: [] };
  const to = group.over?.time ?? snapshot.answered ?? snapshot.time;
  const marked = snapshot.events.filter((event) => (!event.job || event.job === group.job) && event.kind !== "joined").map((event) => event.time);
  const joined = snapshot.events.findLast((event) => event.kind === "joined" && event.job === group.job)?.time ?? Infinity;
  const begun = Math.min(trend.seconds[0] ?? to - 60, shown.past?.seconds[0] ?? Infinity, joined);
  const from = Math.min(to - 30, Math.max(begun, to - 600));
  const marks = marked.filter((time) => time > from && time < to);
  setText(first("#time header p"), `${clock(from)} to ${clock(to)}${group.over ? ", the end" : ""}${marks.length ? "; dashed: events" : ""}`);
  const span = { from, to, marks };
  const { seconds, rounds_per_second: speed } = trend;
  const [median, p99] = [trend.median, trend.p99].map((values) => values.map((value) => value || NaN)); // 0: no rounds
  chart("speed").draw({
    ...span, title: "Rounds per second (mean of 4\u00a0s before)", seconds, lines: [{ values: speed, kind: "area" }], format: two, low: 0,
    high: 1.1 * most([1, ...speed.filter(Number.isFinite)]), describe: (at) => known(speed[at], two),
  });
  chart("trip").draw({
    ...span, title: "Round trip (in the 4\u00a0s before)", seconds, lines: [{ values: p99, label: "p99" }, { values: median, label: "median" }], format: duration,
    low: 0, high: 1.1 * most([0.001, ...p99.filter(Number.isFinite)]),
    describe: (at) => `median ${known(median[at], duration)}, p99 ${known(p99[at], duration)}`,
  });
  for (const name of ["variances", "means"]) drawLayer(group, layer, name, span);
}

// A thick, named line for each rank with a finding; thin lines for the others, or their range above MANY.
function drawLayer(group, layer, name, span) {
  const node = chart(name);
  node.node.hidden = !layer;
  if (!layer) return;
  const { seconds, ranks, [name]: all } = shown.past ?? { seconds: [], ranks: [], [name]: [] };
  const skewed = skews(group);
  const value = (at, column) => all[at * ranks.length + column];
  const columns = [...ranks.keys()];
  const usual = columns.filter((column) => !skewed.has(ranks[column]));
  const odd = columns.filter((column) => skewed.has(ranks[column]));
  const range = (at) => usual.map((column) => value(at, column)).filter(Number.isFinite);
  const of = (column) => seconds.map((_, at) => value(at, column));
  const lines = usual.length > MANY ? [least, most].map((pick) => ({ values: seconds.map((_, at) => pick(range(at))) })) : usual.map((column) => ({ values: of(column) }));
  lines.push(...odd.map((column) => ({ values: of(column), kind: "odd", label: `rank ${ranks[column]}` })));
  const [down, up] = [least, most].map((pick) => pick(lines.flatMap((line) => line.values).filter(Number.isFinite)));
  const room = 0.15 * (up - down || Math.abs(up) || 1);
  const describe = (at) => {
    const others = range(at);
    const [low, high] = [least, most].map((pick) => two(pick(others)));
    const usually = others.length ? `${odd.length ? "the others " : ""}${low === high ? low : `${low} to ${high}`}` : "";
    return [...odd.map((column) => `rank ${ranks[column]}: ${known(value(at, column), two)}`), usually].filter(Boolean).join(", ");
  };
  const title = [`${name === "means" ? "Mean" : "Variance"} of `, el("code", {}, layer), " by rank"];
  const [low, high] = Number.isFinite(up) ? [name === "means" ? down - room : Math.min(0, down), up + room] : [0, 1];
  const when = group.first_non_finite ? () => "latest finite" : clock;
  node.draw({ ...span, when, title, seconds, lines, format: two, describe, low, high });
}
