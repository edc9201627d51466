// The table of the runs: sorted, filtered, and grouped by ablation, search and seeds.

import { el, formatAge, formatNumber } from "./dom.js";

const ORDERS = { name: 1, state: 1, steps: -1, value: 1, base: 1, bounds: -1, updated: -1 }; // first click
const RUN_COLUMNS = [
  ["name", "run", ({ label, name }) => label ?? name],
  ["state", "state", ({ state }) => state],
  ["steps", "steps", ({ steps }) => steps],
  ["value", "held-out", (run) => valueOf(run)],
  ["base", "base", ({ base }) => base],
  ["bounds", "bounds met", ({ bounds }) => (bounds ? bounds.met / bounds.of : null)],
  ["updated", "when", ({ updated }) => updated],
];

const valueOf = ({ main, held_out: heldOut }) => heldOut ?? main?.value ?? null;
export const shownName = (name) => (name === "." ? "this run" : name);

export class RunsTable {
  // actions: {link: names -> address, groupLink: group -> address, choose: names, openGroup: name}
  constructor(element, actions) {
    this.element = element;
    this.actions = actions;
    this.sort = { key: "updated", order: -1 };
    this.filter = "";
    this.open = new Set();
    this.lines = new Map();
    this.data = { runs: [], groups: [] };
    this.chosen = { runs: [], group: null };
    this.build();
  }

  build() {
    this.heads = RUN_COLUMNS.map(([key, title]) => {
      const button = el("button", { type: "button", onclick: () => this.sortBy(key) }, title);
      return el("th", { scope: "col", class: `of-${key}` }, button);
    });
    this.body = el("tbody");
    this.none = el("p", { class: "note", id: "no-match", hidden: true }, "No run matches.");
    const search = el("input", {
      type: "search",
      id: "filter",
      placeholder: "Filter: name, state, error",
      "aria-label": "Filter the runs",
      oninput: () => {
        this.filter = search.value.trim().toLowerCase();
        this.draw();
      },
    });
    const compare = el("th", { class: "of-tick" }, el("span", { class: "sr-only" }, "compare"));
    const head = el("thead", {}, el("tr", {}, compare, this.heads));
    const rows = el(
      "table",
      { id: "runs" },
      el("caption", { class: "sr-only" }, "Runs"),
      head,
      this.body,
    );
    this.element.replaceChildren(search, el("div", { class: "scroll" }, rows), this.none);
  }

  show(data, chosen) {
    this.data = data;
    this.chosen = chosen;
    const mine = data.groups.filter(
      ({ name, runs }) => name === chosen.group || runs.some((run) => chosen.runs.includes(run)),
    );
    for (const { name } of mine) if (!this.seen?.has(name)) this.open.add(name);
    this.seen = new Set([...(this.seen ?? []), ...mine.map(({ name }) => name)]);
    this.draw();
  }

  sortBy(key) {
    const order = this.sort.key === key ? -this.sort.order : ORDERS[key];
    this.sort = { key, order };
    this.draw();
  }

  draw() {
    this.heads.forEach((head, at) => {
      const isSorted = RUN_COLUMNS[at][0] === this.sort.key;
      head.setAttribute(
        "aria-sort",
        !isSorted ? "none" : this.sort.order > 0 ? "ascending" : "descending",
      );
    });
    const shown = this.shownLines();
    // Lines stay in place while they change: a click must find the element that it began on.
    shown.forEach((line, at) => {
      if (this.body.children[at] !== line) this.body.insertBefore(line, this.body.children[at] ?? null);
    });
    while (this.body.children.length > shown.length) this.body.lastChild.remove();
    this.none.hidden = shown.length > 0 || this.data.runs.length === 0;
  }

  sorted() {
    const read = RUN_COLUMNS.find(([key]) => key === this.sort.key)[2];
    const matches = ({ name, state, error }) =>
      `${shownName(name)} ${state} ${error ?? ""}`.toLowerCase().includes(this.filter);
    const compare = (one, other) => {
      const [a, b] = [read(one), read(other)];
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
      if (b === null || b === undefined) return -1;
      return (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b) * this.sort.order;
    };
    return this.data.runs.filter(matches).sort(compare);
  }

  // A group stands where its first run would stand; a filter opens it.
  shownLines() {
    const groupOf = new Map(
      this.data.groups.flatMap((group) => group.runs.map((run) => [run, group])),
    );
    const runs = this.sorted();
    const inside = groupRuns(runs, groupOf);
    const lines = [];
    for (const run of runs) {
      const group = groupOf.get(run.name);
      if (!group) lines.push(this.line(run, false));
      else if (inside.get(group)[0] === run) {
        const isOpen = this.open.has(group.name) || this.filter !== "";
        lines.push(this.groupLine(group, isOpen));
        if (!isOpen) continue;
        lines.push(...group.rows.map((row, at) => this.meanLine(group, row, at)));
        lines.push(...inside.get(group).map((member) => this.line(member, true)));
      }
    }
    return lines;
  }

  cached(key, make, ...data) {
    if (!this.lines.has(key)) this.lines.set(key, make());
    return this.lines.get(key)(...data);
  }

  line(run, isInside) {
    const isChosen = this.chosen.runs.includes(run.name);
    return this.cached(`run ${run.name}`, () => this.makeLine(run.name), run, isInside, isChosen);
  }

  makeLine(name) {
    const tick = el("input", { type: "checkbox", "aria-label": `Compare ${shownName(name)}` });
    tick.addEventListener("change", () => {
      const others = this.chosen.runs.filter((other) => other !== name);
      this.actions.choose(tick.checked ? [...others, name] : others);
    });
    const state = el("span", {});
    const link = el("a", { href: this.actions.link([name]) });
    const about = el("span", { class: "about" });
    const error = el("span", { class: "error" });
    const bar = el("progress", { "aria-label": "Steps" });
    const cells = Object.fromEntries(
      RUN_COLUMNS.slice(2).map(([key]) => [key, el("td", { class: `of-${key} number` })]),
    );
    const line = el(
      "tr",
      {},
      el("td", { class: "of-tick" }, tick),
      el("th", { scope: "row", class: "of-name" }, link, about, error, bar),
      el("td", { class: "of-state" }, state),
      Object.values(cells),
    );
    return (run, isInside, isChosen) => {
      tick.checked = isChosen;
      line.dataset.state = run.state;
      line.className = `${isChosen ? "shown" : ""} ${isInside ? "inside" : ""}`.trim();
      if (isChosen) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      const seed = run.seed === null || run.seed === undefined ? "" : `, seed ${run.seed}`;
      write(link, isInside && run.label ? `${run.label}${seed}` : shownName(name));
      state.className = `state ${run.state}`;
      write(state, run.state);
      const steps = `${run.steps}${run.planned ? ` / ${run.planned}` : ""}`;
      const age = formatAge(Date.now() / 1000 - run.updated);
      write(about, `${steps}, ${age}`);
      write(error, run.error ?? "");
      write(cells.steps, steps);
      write(cells.value, formatNumber(valueOf(run)));
      cells.value.title = run.main?.label ?? "";
      write(cells.base, formatNumber(run.base));
      write(cells.bounds, run.bounds ? `${run.bounds.met} of ${run.bounds.of}` : "–");
      write(cells.updated, age);
      bar.hidden = !run.planned || !["running", "paused"].includes(run.state);
      bar.max = run.planned || 1;
      bar.value = run.steps;
      return line;
    };
  }

  groupLine(group, isOpen) {
    const make = () => {
      const toggle = el(
        "button",
        { type: "button", class: "twist", onclick: () => this.toggle(group.name) },
      );
      const link = el("a", { href: this.actions.groupLink(group.name) });
      const about = el("span", { class: "about always" });
      const line = el(
        "tr",
        { class: "group" },
        el("td", { class: "of-tick" }, toggle),
        el("th", { scope: "rowgroup", colspan: RUN_COLUMNS.length }, link, about),
      );
      return (known, isShown) => {
        toggle.setAttribute("aria-expanded", String(isShown));
        toggle.setAttribute("aria-label", `Runs of ${known.title}`);
        write(toggle, isShown ? "▾" : "▸");
        write(link, known.title);
        write(
          about,
          `${known.kind === "seeds" ? "several seeds" : known.kind}, ${known.runs.length} runs`,
        );
        line.classList.toggle("shown", this.chosen.group === known.name);
        return line;
      };
    };
    return this.cached(`group ${group.name}`, make, group, isOpen);
  }

  toggle(name) {
    if (!this.open.delete(name)) this.open.add(name);
    this.draw();
  }

  // Means over the seeds of one variant, with their intervals.
  meanLine(group, row, at) {
    const make = () => {
      const cells = ["steps", "value", "base"].map(
        (key) => el("td", { class: `of-${key} number` }),
      );
      const label = el("th", { scope: "row", class: "of-name" });
      const line = el(
        "tr",
        { class: "mean inside" },
        el("td", { class: "of-tick" }),
        label,
        el("td", { class: "of-state" }),
        cells,
        el("td", { class: "of-bounds" }),
        el("td", { class: "of-updated" }),
      );
      return (known) => {
        write(label, known.label);
        [known.steps, known.held_out, known.base].forEach(
          (text, place) => write(cells[place], text ?? "–"),
        );
        return line;
      };
    };
    return this.cached(`mean ${at} ${group.name}`, make, row);
  }
}

function write(element, text) {
  const shown = String(text);
  if (element.textContent !== shown) element.textContent = shown;
}

function groupRuns(runs, groupOf) {
  const inside = new Map();
  for (const run of runs) {
    const group = groupOf.get(run.name);
    inside.set(group, [...(inside.get(group) ?? []), run]);
  }
  return inside;
}
