// One layer of the heat map: each rank's mean and variance over the last hour, and those who differ most now.
"use strict";

const LAYER_MS = 5000;
const TOLD_DIFFERING = 8;
const CHART = { height: 180, left: 64, right: 56, top: 12, bottom: 22 };

const short = (value) => (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 1e5) ? value.toFixed(3) : value.toExponential(1));

// How far each rank is from the usual one, in multiples of what the others are as a rule.
function distances(values) {
  const usual = median(values);
  const away = values.map((value) => Math.abs(value - usual));
  const rule = Math.max(median(away), 1e-3 * Math.abs(usual), 1e-12);
  return away.map((value) => value / rule);
}

function drawChart(canvas, times, rows, odd, name) {
  const width = Math.max(260, canvas.parentElement.clientWidth);
  const pen = sized(canvas, width, CHART.height);
  const low = rows.reduce((least, row) => Math.min(least, ...row), Infinity);
  const high = rows.reduce((most, row) => Math.max(most, ...row), -Infinity);
  const [first, last] = [times[0], times[times.length - 1]];
  const x = (time) => CHART.left + ((time - first) / (last - first || 1)) * (width - CHART.left - CHART.right);
  const y = (value) => CHART.top + ((high - value) / (high - low || 1)) * (CHART.height - CHART.top - CHART.bottom);
  pen.fillStyle = colour("--faint");
  pen.textAlign = "right";
  pen.fillText(short(high), CHART.left - 6, CHART.top + 8);
  pen.fillText(short(low), CHART.left - 6, CHART.height - CHART.bottom);
  pen.textAlign = "left";
  pen.fillText(new Date(first * 1000).toLocaleTimeString(), CHART.left, CHART.height - 6);
  pen.textAlign = "right";
  pen.fillText(new Date(last * 1000).toLocaleTimeString(), width - CHART.right, CHART.height - 6);
  const line = (rank) => {
    pen.beginPath();
    rows.forEach((row, at) => pen.lineTo(x(times[at]), y(row[rank])));
    if (rows.length === 1) pen.rect(x(first), y(rows[0][rank]), 2, 2);
    pen.stroke();
  };
  pen.strokeStyle = colour("--bar");
  pen.globalAlpha = rows[0].length > 50 ? 0.25 : 0.7;
  for (let rank = 0; rank < rows[0].length; rank += 1) if (rank !== odd) line(rank);
  if (odd < 0) return;
  pen.globalAlpha = 1;
  pen.lineWidth = 2.5;
  pen.setLineDash([6, 3]);
  pen.strokeStyle = colour("--bad");
  line(odd);
  pen.fillStyle = colour("--bad");
  pen.textAlign = "left";
  pen.fillText(name, x(last) + 4, y(rows[rows.length - 1][odd]) + 4);
}

class Layer {
  constructor(names) {
    this.names = names;
    this.section = make("section", "", "layer");
    this.section.hidden = true;
    this.section.onkeydown = (event) => event.key === "Escape" && this.close();
  }

  open(name, button) {
    this.close();
    [this.name, this.button, this.told] = [name, button, null];
    button.setAttribute("aria-expanded", "true");
    const title = make("h3", `Layer ${name}`);
    title.tabIndex = -1;
    const close = make("button", "Close");
    close.type = "button";
    close.onclick = () => this.close();
    this.charts = ["mean", "variance"].map((kind) => {
      const figure = make("figure");
      const canvas = make("canvas");
      canvas.setAttribute("role", "img");
      figure.append(make("figcaption", `The ${kind} of each rank`), canvas);
      return { kind, canvas, figure };
    });
    this.ranks = make("div");
    this.section.replaceChildren(title, close, ...this.charts.map((chart) => chart.figure), this.ranks);
    this.section.hidden = false;
    this.section.scrollIntoView({ block: "nearest" });
    title.focus({ preventScroll: true });
    this.ask(name);
  }

  close() {
    if (this.section.hidden) return;
    clearTimeout(this.timer);
    this.name = undefined;
    this.section.hidden = true;
    this.button.removeAttribute("aria-expanded");
    this.button.focus({ preventScroll: true });
  }

  async ask(name) {
    try {
      const answer = await fetch(`history?${new URLSearchParams({ ...this.names, layer: name })}`);
      const told = answer.status === 200 ? await answer.json() : null;
      if (this.name !== name) return; // closed meanwhile, or another one is open
      if (told) {
        this.told = told;
        this.draw();
      }
      if (!this.told) this.ranks.replaceChildren(make("p", "nothing is kept of this layer yet"));
    } catch {
      // The stream of snapshots says on the page that the view does not answer.
    }
    if (this.name === name) this.timer = setTimeout(() => this.ask(name), LAYER_MS);
  }

  draw() {
    if (this.section.hidden || !this.told) return;
    const { times, means, variances } = this.told;
    const now = { mean: means[means.length - 1], variance: variances[variances.length - 1] };
    const [byMean, byVariance] = [distances(now.mean), distances(now.variance)];
    const score = byMean.map((value, rank) => Math.max(value, byVariance[rank]));
    const order = [...score.keys()].sort((a, b) => score[b] - score[a]);
    const odd = score.length > 2 && score[order[0]] >= 6 ? order[0] : -1;
    const name = called(this.named, odd);
    for (const { kind, canvas } of this.charts) {
      drawChart(canvas, times, kind === "mean" ? means : variances, odd, name);
      const usual = `median ${short(median(now[kind]))}`;
      const text = odd < 0 ? `no rank is far from the others, ${usual}` : `${name} ${short(now[kind][odd])}, ${usual}`;
      canvas.setAttribute("aria-label", `${kind} over ${Math.round(times[times.length - 1] - times[0])} s; now ${text}`);
    }
    const rows = order.slice(0, TOLD_DIFFERING).map((rank) => {
      const row = make("tr");
      row.append(...[String(this.named[rank] ?? "?"), short(now.mean[rank]), short(now.variance[rank])].map((text) => make("td", text, "number")));
      return row;
    });
    this.ranks.replaceChildren(make("p", "Now, those who differ most first"), table("Figures of ranks", ["rank", "mean", "variance"], rows));
  }
}
