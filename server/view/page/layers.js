// The map of layers: a row for each rank, and in it a bar for each layer in the order of a step. Height and a dark cap
// carry the meaning without colour. A cell stands out if its rank has a finding and the layer shows it.

import { Source, byId, colours, el, first, floats, median, percent, render, setText, sized, skews, times, two } from "./dom.js";
import { flag, shownMembers } from "./ranks.js";

const TITLES = {
  share: "how much of the layer's variance comes from the distance between the rank's mean and the overall mean; a full bar is 30%, on a square-root scale",
  variance: "up where the rank varies more than the others, down where less; a full bar is 16 times, on a logarithmic scale",
  mean: "how far the rank's mean lies from the others'; a full bar is half a standard deviation",
};
const CHIPS = 3;

// Pairs of a maximum number of ranks and the height of a row in pixels.
const HEIGHTS = [[8, 34], [16, 24], [64, 14], [Infinity, 6]];

const source = new Source("heat");
const canvas = first("#layers canvas");
const scrub = byId("scrub");

// What is shown: the group, its figures, the layer and the rank that the reader has chosen, and what is pointed at.
const shown = { key: "", group: null, figures: null, layer: null, rank: null, pointed: null, chips: null, picked: false, finding: null };

export async function drawLayers(group, snapshot) {
  const key = JSON.stringify([group.job, group.group]);
  if (key !== shown.key) Object.assign(shown, { key, figures: null, layer: null, rank: null, pointed: null, chips: null, picked: false, finding: null });
  shown.group = group;
  draw();
  if (!group.has_figures || (shown.figures && (snapshot.error || group.over))) return;
  const answer = await source.ask({ job: group.job, group: group.group });
  if (!answer || key !== shown.key) return;
  shown.figures = decoded(answer);
  dispatchEvent(new Event("redraw"));
}

function decoded(answer) {
  const { layers, members } = answer;
  const arrays = Object.fromEntries(["parts", "ratios", "means", "variances"].map((name) => [name, floats(answer[name])]));
  const of = (name, at) => arrays[name].subarray(at * members, (at + 1) * members);
  const columns = new Map(answer.ranks.map((rank, column) => [rank ?? column, column]));
  const usual = layers.map((_, at) => ({
    part: median(of("parts", at)),
    mean: median(of("means", at)),
    deviation: Math.sqrt(median(of("variances", at))) || 1,
  }));
  return { ...answer, ...arrays, columns, usual };
}

// The shown layer: the chosen layer, else the layer of a problem, else the layer with most variance between ranks.
export function shownLayer() {
  const { figures, group, layer } = shown;
  if (!figures) return null;
  const skew = [...skews(group).values()].at(-1);
  const awaited = group.verdict.state === "waiting" && group.waiting?.[0]?.layer;
  for (const name of [layer, awaited, group.first_non_finite?.layer, skew?.layer]) {
    if (figures.layers.includes(name)) return name;
  }
  return figures.layers[figures.eta2.indexOf(Math.max(...figures.eta2))];
}

// A cell's height from -1 to 1, and whether it is high enough to stand out if its rank has a finding.
function cell(figures, view, layer, column) {
  const at = layer * figures.members + column;
  const usual = figures.usual[layer];
  if (view === "share") {
    const part = figures.parts[at];
    return [Math.min(1, Math.sqrt(Math.max(0, part) / 0.3)), part >= 3 * usual.part && part - usual.part >= 0.02];
  }
  const signed = view === "variance" ? Math.log2(figures.ratios[at]) / 4 : (2 * (figures.means[at] - usual.mean)) / usual.deviation;
  return [Math.max(-1, Math.min(1, signed)), Math.abs(signed) >= (view === "variance" ? 0.25 : 0.4)];
}

const view = () => first("[name=view]:checked").value;

// Chooses the view that shows the finding best, until the reader chooses one.
function chooseView(group) {
  const skew = [...skews(group).values()].at(-1);
  const finding = skew ? JSON.stringify([skew.rank, skew.layer, skew.step]) : "";
  if (shown.picked || shown.finding === finding) return;
  shown.finding = finding; // the view stays while only the finding's numbers change
  const isOfVariance = skew && skew.part < 0.1 && Math.abs(Math.log2(skew.variance)) >= 1;
  first(`[name=view][value=${isOfVariance ? "variance" : "share"}]`).checked = true;
}

function draw() {
  const { figures, group } = shown;
  chooseView(group);
  first("#layers .map").hidden = first("#layers .reading").hidden = first("#layers .choice").hidden = !figures;
  const about = figures ? `${figures.layers.length} layers in the order of a step: ${TITLES[view()]}` : "no figures yet: in jobs with a fixed number of ranks the server samples one step a second";
  setText(first("#layers header p"), about);
  render(first("#layers .chips"), figures ? chips() : []);
  if (!figures) return;
  const members = shownMembers(group);
  const height = HEIGHTS.find(([most]) => members.length <= most)[1];
  const every = height < 14 ? 4 : 1;
  const labels = members.map((member, at) => {
    const made = el("span", { class: height < 24 && "small" }, at % every ? "" : String(member.member), height >= 14 && flag(member));
    made.style.height = `${height}px`;
    return made;
  });
  render(first("#layers .labels"), labels);
  paint(members, height);
  drawStages();
  drawReading(members);
  render(first("#layers .key"), key("bar", "a rank"), key("bar odd", "stands out"), group.first_non_finite && el("span", {}, el("b", { class: "bad" }, "×"), "first NaN or infinity"));
}

const key = (name, text) => el("span", {}, el("i", { class: name }), text);

function chips() {
  const { layers, eta2 } = shown.figures;
  // The chips stay while the focus or the pointer is on one.
  if (!shown.chips || !first("#layers .chips").matches(":focus-within, :hover")) {
    shown.chips = [...layers.keys()].sort((a, b) => eta2[b] - eta2[a]).slice(0, CHIPS).map((at) => layers[at]);
  }
  const buttons = shown.chips.map((name) => {
    const pressed = String(name === shownLayer());
    const button = { type: "button", "data-key": `layer ${name}`, "data-layer": name, "aria-pressed": pressed };
    return el("button", button, el("code", {}, name), ` ${percent(eta2[layers.indexOf(name)] ?? 0)}`);
  });
  return [el("span", {}, "Most variance between the ranks' means:"), buttons];
}

function paint(members, height) {
  const { figures, group } = shown;
  const { pen, width } = sized(canvas, height * members.length);
  const { card, wash, column: chosen, mark, hot, glow, ink, bad } = colours("card", "wash", "column", "mark", "hot", "glow", "ink", "bad");
  const size = figures.layers.length;
  const wide = width / size;
  const found = skews(group);
  const at = figures.layers.indexOf(shownLayer());
  const name = view();
  const tall = height - (height > 8 ? 2 : 1);
  members.forEach((member, row) => {
    const top = row * height;
    pen.fillStyle = wash;
    pen.fillRect(0, top, width, tall);
    pen.fillStyle = chosen;
    pen.fillRect(at * wide, top, wide, tall);
    const column = figures.columns.get(member.member);
    if (column === undefined) return;
    const finding = found.get(member.member);
    pen.fillStyle = mark; // once for a row: to set a colour takes as long as to draw a bar
    for (let layer = 0; layer < size; layer += 1) {
      const [value, isHigh] = cell(figures, name, layer, column);
      if (Number.isNaN(value)) continue;
      const stands = finding && (isHigh || (name === "share" && finding.layer === figures.layers[layer]));
      const half = name === "share" ? 0 : tall / 2;
      const long = Math.max(name === "share" ? 1.5 : 1, Math.abs(value) * (tall - half));
      const from = value < 0 ? top + half : top + tall - half - long;
      if (!stands) {
        pen.fillRect(layer * wide, from, wide, long);
        continue;
      }
      const cap = value < 0 ? from + long - 2 : from;
      for (const [fill, y, size] of [[glow, top, tall], [hot, from, long], [ink, cap, 2]]) {
        pen.fillStyle = fill;
        pen.fillRect(layer * wide, y, wide, size);
      }
      pen.fillStyle = mark;
    }
    if (name !== "share") pen.fillRect(0, top + tall / 2 - 0.5, width, 1);
  });
  if (wide >= 4) {
    pen.fillStyle = card;
    const gap = wide > 10 ? 2 : 1;
    for (let layer = 1; layer < size; layer += 1) pen.fillRect(Math.round(layer * wide) - gap / 2, 0, gap, height * members.length);
  }
  cross(pen, members, height, wide, bad);
  const rank = shown.pointed?.rank ?? shown.rank;
  const row = members.findIndex((member) => member.member === rank);
  if (row < 0) return;
  pen.strokeStyle = ink;
  pen.lineWidth = 2;
  pen.strokeRect((shown.pointed?.layer ?? at) * wide, row * height, wide, tall);
}

// Draws a cross where the first NaN or infinity came from.
function cross(pen, members, height, wide, bad) {
  const { group, figures } = shown;
  const found = group.first_non_finite;
  const layer = figures.layers.indexOf(found?.layer);
  if (layer < 0) return;
  pen.strokeStyle = bad;
  pen.lineWidth = 3;
  members.forEach((member, row) => {
    if (!found.ranks.includes(member.member)) return;
    const [x, y, arm] = [(layer + 0.5) * wide, (row + 0.5) * height - 1, Math.min(7, height / 2 - 2)];
    pen.beginPath();
    for (const side of [-1, 1]) {
      pen.moveTo(x - arm, y - side * arm);
      pen.lineTo(x + arm, y + side * arm);
    }
    pen.stroke();
  });
}

// Above the map: the layers' names if there is room, else their stages, the part of a name before the first dot.
function drawStages() {
  const { layers } = shown.figures;
  const width = canvas.clientWidth;
  const isNamed = width / layers.length >= 64;
  const runs = [];
  layers.forEach((name, at) => {
    const stage = isNamed ? name : name.split(".")[0];
    if (!isNamed && runs.at(-1)?.stage === stage) runs.at(-1).size += 1;
    else runs.push({ stage, at, size: 1 });
  });
  const labels = runs.map(({ stage, at, size }) => {
    const room = (size / layers.length) * width;
    const label = el("span", { title: stage }, room > 7 * stage.length + 8 || isNamed ? stage : "");
    Object.assign(label.style, { left: `${(100 * at) / layers.length}%`, width: `${(100 * size) / layers.length}%` });
    return label;
  });
  render(first("#layers .stages"), labels);
}

function drawReading(members) {
  const { figures, pointed } = shown;
  const at = pointed?.layer ?? figures.layers.indexOf(shownLayer());
  const rank = pointed ? pointed.rank : shown.rank;
  const name = figures.layers[at];
  const text = inWords(at, rank);
  render(byId("reading"), el("code", {}, name), `: ${text}`);
  if (Number(scrub.max) !== figures.layers.length - 1) scrub.max = figures.layers.length - 1;
  if (!pointed && Number(scrub.value) !== at) scrub.value = at;
  if (!pointed) scrub.setAttribute("aria-valuetext", `${name}: ${text}`);
  // The thumb stands below the middle of its cell.
  const wide = canvas.clientWidth / figures.layers.length;
  const thumb = 14;
  Object.assign(scrub.style, { marginLeft: `${(wide - thumb) / 2}px`, width: `${canvas.clientWidth - wide + thumb}px` });
  shown.order = members.map((member) => member.member);
}

// Rounds with NaN or infinity have no figures.
function inWords(at, rank) {
  const { figures, group } = shown;
  const first = group.first_non_finite;
  const text = figures.columns.has(rank) ? rankInWords(at, rank) : layerInWords(at);
  if (!first) return text;
  const what = first.what.replace("inf", "infinity") || "NaN or infinity";
  if (figures.layers[at] === first.layer && first.phase === "forward") return `${what} at step ${first.step}; its latest finite values: ${text}`;
  return `its latest finite values (first ${what} at step ${first.step}): ${text}`;
}

// A rank's part, variance and shift in a layer; if the rank has a finding in this layer, the banner's numbers.
function numbers(at, column) {
  const { figures, group } = shown;
  const found = skews(group).get(figures.ranks[column]);
  if (found?.is_present && found.layer === figures.layers[at]) return found;
  const place = at * figures.members + column;
  const { mean, deviation } = figures.usual[at];
  return { part: figures.parts[place], variance: figures.ratios[place], shift: (figures.means[place] - mean) / deviation };
}

function layerInWords(at) {
  const { figures } = shown;
  const own = figures.parts.subarray(at * figures.members, (at + 1) * figures.members);
  const isOdd = (column) => cell(figures, "share", at, column)[1] || cell(figures, "variance", at, column)[1];
  const found = [...skews(shown.group).keys()].map((rank) => figures.columns.get(rank)).find((column) => column !== undefined && isOdd(column));
  const most = found ?? own.reduce((best, part, column) => (part > own[best] ? column : best), 0);
  const head = `${percent(figures.eta2[at])} of the variance lies between the ranks' means`;
  const rank = `rank ${figures.ranks[most] ?? most}`;
  const { part, variance } = numbers(at, most);
  const comes = cell(figures, "share", at, most)[1] ? `: ${percent(part)} comes from ${rank}` : "";
  const isUsual = variance > 0.67 && variance < 1.5;
  if (!comes && isUsual) return `${head}, spread evenly`;
  const varies = `varies ${times(variance)} as much as the others`;
  return comes ? head + comes + (isUsual ? "" : `, which ${varies}`) : `${rank} ${varies}; ${head}`;
}

function rankInWords(at, rank) {
  const { part, variance, shift } = numbers(at, shown.figures.columns.get(rank));
  return (
    `${percent(part)} of the variance comes from the mean of rank ${rank}; it varies ${times(variance)} as much as the others, ` +
    `and its mean lies ${two(Math.abs(shift))} standard deviations ${shift < 0 ? "below" : "above"} theirs`
  );
}

function redraw() {
  dispatchEvent(new Event("redraw"));
}

function cellAt(event) {
  const box = canvas.getBoundingClientRect();
  const within = (part, size) => Math.max(0, Math.min(size - 1, Math.floor(part * size)));
  const layer = within((event.clientX - box.left) / box.width, shown.figures.layers.length);
  return { layer, rank: shown.order[within((event.clientY - box.top) / box.height, shown.order.length)] };
}

canvas.onpointermove = (event) => {
  const found = cellAt(event);
  if (found.layer === shown.pointed?.layer && found.rank === shown.pointed.rank) return;
  shown.pointed = found;
  draw();
};
canvas.onpointerleave = () => {
  shown.pointed = null;
  draw();
};
canvas.onclick = (event) => {
  const { layer, rank } = cellAt(event);
  Object.assign(shown, { layer: shown.figures.layers[layer], rank, pointed: null });
  redraw();
};
scrub.oninput = () => {
  Object.assign(shown, { layer: shown.figures.layers[Number(scrub.value)], pointed: null });
  redraw();
};
scrub.onkeydown = (event) => {
  const way = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!way) return;
  event.preventDefault();
  const at = shown.order.indexOf(shown.rank);
  const next = at < 0 && way < 0 ? shown.order.length - 1 : at + way;
  shown.rank = shown.order[next] ?? null;
  redraw();
};
first("#layers .choice").onchange = () => {
  shown.picked = true;
  redraw();
};
first("#layers .chips").onclick = (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  Object.assign(shown, { layer: button.dataset.layer, pointed: null });
  redraw();
};
