// The heat map: for each job a row for each layer, the most skewed first, and in it a cell for each rank.
"use strict";

// A cell is marked where the rank's part is so many times the usual one, and so much more: as the server's finding is.
const HIGH_RATIO = 3;
const HIGH_PART = 0.02;

// At this ratio a cell has the full colour.
const FULL_RATIO = 30;

const CELL = { least: 3, most: 44, number: 30, height: 36, head: 18 };

// A map that takes long to fetch and draw, of many ranks, is asked for less often: it takes a tenth of the time at most.
const REST_TIMES = 10;
const TOLD_HIGH = 3;

// In a smaller group than the job the second member may be rank 5.
const called = (ranks, member) => (Number.isInteger(ranks[member]) ? `rank ${ranks[member]}` : `member ${member}`);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function median(values) {
  const sorted = Float64Array.from(values).sort();
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Each rank's part in a layer beside the usual one.
function judged(parts) {
  const usual = median(parts);
  const least = Math.max(usual, 1e-6);
  const isHigh = (part) => part >= HIGH_RATIO * usual && part - usual >= HIGH_PART;
  const level = (part) =>
    part <= least ? 0 : Math.min(1, Math.log(part / least) / Math.log(FULL_RATIO)) * Math.min(1, part / HIGH_PART);
  const high = [...parts.keys()].filter((rank) => isHigh(parts[rank])).sort((a, b) => parts[b] - parts[a]);
  return { usual, level, isHigh, high };
}

// A canvas of so many CSS pixels, sharp on any screen; returns what draws on it.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  return pen;
}

function drawCells(canvas, parts, width) {
  const pen = sized(canvas, width * parts.length, CELL.height);
  const { level, isHigh } = judged(parts);
  const gap = width > 6 ? 1 : 0;
  const [hot, ink, ground] = [colour("--hot"), colour("--ink"), colour("--ground")];
  pen.fillStyle = hot;
  parts.forEach((part, rank) => {
    pen.globalAlpha = 0.06 + 0.94 * level(part);
    pen.fillRect(rank * width, 0, width - gap, CELL.height);
  });
  pen.globalAlpha = 1;
  pen.textAlign = "center";
  parts.forEach((part, rank) => {
    if (isHigh(part)) mark(pen, rank * width + (width - gap) / 2, width, part, ink, ground);
  });
}

// What tells a high cell from the others without colour: its number, or a diamond where that has no room.
function mark(pen, middle, width, part, ink, ground) {
  const half = width >= CELL.number ? 16 : Math.max(3, Math.min(6, width / 2));
  const y = CELL.height / 2;
  pen.fillStyle = ground;
  pen.strokeStyle = ink;
  pen.beginPath();
  if (width >= CELL.number) {
    pen.rect(middle - half, y - 9, 2 * half, 18);
  } else {
    pen.moveTo(middle, y - 2 * half);
    pen.lineTo(middle + half, y);
    pen.lineTo(middle, y + 2 * half);
    pen.lineTo(middle - half, y);
    pen.closePath();
  }
  pen.fill();
  pen.stroke();
  pen.fillStyle = ink;
  if (width >= CELL.number) pen.fillText(part.toFixed(2), middle, y + 4);
}

function drawRanks(canvas, ranks, width) {
  const pen = sized(canvas, width * ranks.length, CELL.head);
  const every = [1, 2, 5, 10, 20, 50, 100].find((step) => step * width >= 30) || 100;
  pen.fillStyle = colour("--faint");
  for (let at = 0; at < ranks.length; at += every) pen.fillText(String(ranks[at] ?? "?"), at * width + 1, 13);
}

class Heat {
  constructor(job, group) {
    this.names = { job, group };
    this.rows = new Map();
    this.rests = 0;
    this.section = make("section", "", "heat");
    this.summary = make("p", "", "summary");
    this.scroll = make("div", "", "scroll cells");
    this.scroll.tabIndex = 0;
    this.scroll.setAttribute("role", "region");
    this.scroll.setAttribute("aria-label", `Layers of job ${job}, group ${group}`);
    const table = make("table");
    const head = table.createTHead().insertRow();
    this.ranks = make("canvas");
    this.ranks.setAttribute("aria-hidden", "true");
    const corner = make("th", "layer");
    corner.scope = "col";
    const ranks = make("th");
    ranks.scope = "col";
    ranks.append(make("span", "ranks", "hidden"), this.ranks);
    head.append(corner, ranks);
    this.body = table.createTBody();
    this.scroll.append(table);
    const legend =
      "Most skewed layers first. The stronger the colour, the more of the variance between ranks comes from this rank; " +
      "a number or a diamond marks a part that is far greater than the others'. η² is what lies between ranks altogether.";
    const title = make("h2", `Layers of job ${job}, group ${group}`);
    this.section.append(title, this.summary, make("p", legend, "faint"), this.scroll);
  }

  // Called with each snapshot, since that is when there are new figures.
  async ask() {
    const begun = performance.now();
    if (begun < this.rests) return;
    this.rests = Infinity; // until it is answered
    try {
      const answer = await fetch(`heat?${new URLSearchParams(this.names)}`);
      if (answer.status === 200) this.show(await answer.json());
    } catch {
      // The stream of snapshots says on the page that the view does not answer.
    }
    this.rests = begun + REST_TIMES * (performance.now() - begun);
  }

  end() {
    this.section.remove();
  }

  show({ layers, eta2, members, ranks, parts }) {
    const bytes = Uint8Array.from(atob(parts), (letter) => letter.charCodeAt(0));
    const numbers = new Float32Array(bytes.buffer);
    const told = layers.map((name, at) => {
      const own = numbers.subarray(at * members, (at + 1) * members);
      return { name, eta2: eta2[at], parts: own, high: judged(own).high };
    });
    told.sort((a, b) => b.eta2 - a.eta2);
    [this.told, this.named] = [told, ranks];
    this.tell(told, members);
    this.draw();
    for (const name of this.rows.keys()) {
      if (!layers.includes(name)) this.forget(name);
    }
    // Rows do not move while the reader points at one, or scrolls by keyboard.
    if (!this.scroll.matches(":focus-within, :hover")) {
      this.body.append(...told.map((layer) => this.rows.get(layer.name).row));
    }
  }

  draw() {
    if (!this.told) return;
    const members = this.told[0].parts.length;
    const room = this.scroll.clientWidth - this.ranks.parentElement.offsetLeft - 16;
    const width = Math.max(CELL.least, Math.min(CELL.most, Math.floor(room / members)));
    drawRanks(this.ranks, this.named, width);
    for (const layer of this.told) this.row(layer, width);
  }

  tell(told, members) {
    const odd = told.filter((layer) => layer.high.length);
    let text = `${told.length} layers, ${members} ranks: no rank stands out`;
    if (odd.length) {
      const [first] = odd;
      const part = first.parts[first.high[0]].toFixed(2);
      text = `${told.length} layers, ${members} ranks: ${odd.length} layers with a rank that stands out; most in `;
      text += `${first.name}, ${called(this.named, first.high[0])} with ${part} of the variance`;
    }
    if (this.summary.textContent !== text) this.summary.textContent = text;
  }

  row(layer, width) {
    const made = this.rows.get(layer.name) || this.insert(layer.name);
    const high = layer.high.slice(0, TOLD_HIGH).map((at) => called(this.named, at)).join(", ");
    const more = layer.high.length > TOLD_HIGH ? ` and ${layer.high.length - TOLD_HIGH} more` : "";
    made.told.textContent = `${high ? `high: ${high}${more}; ` : ""}η² ${layer.eta2.toFixed(2)}`;
    made.row.dataset.high = layer.high.join(" ");
    made.parts = layer.parts;
    made.width = width;
    drawCells(made.canvas, layer.parts, width);
  }

  insert(name) {
    const row = this.body.insertRow();
    const head = make("th");
    head.scope = "row";
    const label = make("span", name);
    label.title = name;
    const told = make("small");
    head.append(label, told);
    const canvas = make("canvas");
    canvas.setAttribute("aria-hidden", "true"); // the row's head says the same
    const cell = row.insertCell();
    row.prepend(head);
    cell.append(canvas);
    const made = { row, told, canvas };
    canvas.onmousemove = (at) => {
      const member = Math.min(made.parts.length - 1, Math.floor(at.offsetX / made.width));
      canvas.title = `${called(this.named, member)}: ${made.parts[member].toFixed(3)} of the variance`;
    };
    this.rows.set(name, made);
    return made;
  }

  forget(name) {
    this.rows.get(name).row.remove();
    this.rows.delete(name);
  }
}
