// The timeline of events, the latest first.

import { byId, clock, day, el, icon, render, span } from "./dom.js";

const SHOWN = 8;
const ICONS = {
  joined: "ok", answers: "ok", ended: "end", straggler: "warn", skew: "warn", silent: "warn", lost: "bad", mismatch: "bad", "non-finite": "bad",
};

let all = false;

// Draws the events of all jobs and of the server; an event of a group that is not shown begins with the group's name.
export function drawEvents(snapshot, group) {
  const events = snapshot.events.toReversed();
  const today = day(snapshot.time);
  const items = events.slice(0, all ? events.length : SHOWN).map((event) => {
    const at = { datetime: new Date(1000 * event.time).toISOString(), title: `${span(Math.max(0, snapshot.time - event.time))} ago` };
    const date = day(event.time) === today ? "" : `${day(event.time)}, `;
    const isOther = event.job && (event.job !== group?.job || event.group !== group?.group);
    const name = event.group === "world" || !event.group ? event.job : `${event.job}, ${event.group}`;
    const sign = ICONS[event.kind] ?? "note";
    const text = el("p", {}, isOther ? `${name}: ${event.text}` : event.text);
    return el("li", { class: isOther && "other" }, el("time", at, date + clock(event.time)), icon(sign, sign), text);
  });
  render(byId("events").querySelector("ol"), items.length ? items : el("li", {}, el("p", {}, "None so far")));
  const more = byId("more-events");
  more.hidden = events.length <= SHOWN;
  more.textContent = all ? "Show fewer" : `Show all ${events.length}`;
}

byId("more-events").onclick = () => {
  all = !all;
  dispatchEvent(new Event("redraw"));
};
