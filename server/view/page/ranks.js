// The table of ranks. With more than 16 ranks, ranks with a flag come first, and a button shows the others.

import { LEVELS, byId, duration, el, first, known, percent, render, two, whole } from "./dom.js";

const SHOWN = 16;

let all = false;

// Ranks in the order of the table, for the map of layers too.
export function shownMembers(group) {
  const { members } = group;
  if (all || members.length <= SHOWN) return members;
  const severity = (member) => (member.flag ? 1 + member.severity : 0);
  return [...members].sort((a, b) => severity(b) - severity(a) || a.member - b.member).slice(0, SHOWN);
}

export const flag = (member) => member.flag && el("span", { class: `flag ${LEVELS[member.severity] ?? ""}` }, member.flag);

// A bar and its number; bars of the kind "waits" are hatched, so that the two columns of bars differ without colour.
function bar(value, kind) {
  if (value === null || value === undefined) return "–";
  const filled = el("rect", { class: kind, width: `${Math.min(100, 100 * value)}%`, height: "100%", fill: kind === "waits" && "url(#hatch)" });
  const track = el("rect", { class: "track", width: "100%", height: "100%" });
  return el("span", { class: "meter" }, el("svg", { "aria-hidden": "true" }, track, filled), el("span", {}, percent(value)));
}

function both(median, p99) {
  if (median === null || median === undefined) return "–";
  if (p99 >= 1) return `${two(median)} / ${two(p99)}\u00a0s`;
  return `${two(1000 * median)} / ${two(1000 * p99)}\u00a0ms`;
}

const COLUMNS = [
  ["Process", "who", (m) => m.place],
  ["In rounds", "minute", (m) => bar(m.waiting, "waits")],
  ["Others waited for it", "minute", (m) => bar(m.share, m.flag === "slow" ? "held much" : "held")],
  ["Step", "number", (m) => whole(m.step)],
  ["Steps/s", "number", (m) => known(m.steps_per_second, two)],
  ["Round trip", "number", (m) => both(m.median, m.p99)],
  ["Late", "number", (m) => both(m.late?.median, m.late?.p99)],
  ["Now", "now", (m) => m.doing || "–"],
];

export function drawRanks(group) {
  const table = first("table.ranks");
  const heads = COLUMNS.map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
  render(first("thead", table), el("tr", {}, el("th", { scope: "col" }, "Rank"), heads));
  const rows = shownMembers(group).map((member) => {
    const cells = COLUMNS.map(([name, kind, say]) => el("td", { class: kind, "data-name": name }, say(member)));
    const level = member.flag ? LEVELS[member.severity] : "";
    const head = el("th", { scope: "row", class: level }, el("span", {}, String(member.member)), flag(member));
    return el("tr", { "data-rank": member.member, "data-level": level }, head, cells);
  });
  render(first("tbody", table), rows);
  const { held_seconds: length } = group;
  const warm = length < 59 ? ", after 30\u00a0s of warm-up" : "";
  const shares = length ? `shares are of the last ${duration(length)}${warm}; the time in rounds includes the exchange` : "shares need 40\u00a0s of rounds";
  const when = `${shares}; round trip, and how late a rank was when it came last: median / 99th percentile of all rounds, within a factor of 2`;
  const hidden = group.members_left_out ? `; ${whole(group.members_left_out)} more ranks are not in the report` : "";
  first("#ranks header p").textContent = (group.over ? "as last reported; the column Now is after the end" : when) + hidden;
  const more = byId("more-ranks");
  more.hidden = group.members.length <= SHOWN;
  more.textContent = all ? `Show ${SHOWN} ranks` : `Show all ${whole(group.members.length)} ranks`;
}

byId("more-ranks").onclick = () => {
  all = !all;
  dispatchEvent(new Event("redraw"));
};
