// The tables of the terms and of the rewards: a row for each, which opens its details at a click.

import { chip, el, formatNumber, svg } from "./dom.js";

const SPARK = { width: 84, height: 22 };

// {title, cell: row -> td, when: row -> whether it has something to show there}
const COLUMNS = [
  { title: "value, first → last", cell: valueCell },
  { title: "spread", cell: (row) => textCell(row.texts.std), when: (row) => isNumber(row.std) },
  { title: "weight or bound", cell: weightCell },
  { title: "share", cell: shareCell, when: (row) => isNumber(row.share) },
  { title: "cosine with base", cell: cosineCell, when: (row) => isNumber(row.cosine) },
  {
    title: "factor",
    cell: (row) => textCell(row.texts.factor),
    when: (row) => isNumber(row.factor),
  },
  {
    title: "time",
    cell: (row) => textCell(row.texts.seconds),
    when: (row) => isNumber(row.seconds),
  },
  { title: "failed", cell: (row) => textCell(row.texts.failed), when: (row) => row.failed },
  { title: "finding", cell: findingCell },
];

const isNumber = (value) => value !== null && value !== undefined;

// Only the columns that some row has something for.
export function termTable(heading, rows, caption, { opened, open }) {
  const columns = COLUMNS.filter(({ when }) => !when || rows.some(when));
  const head = [heading, ...columns.map(({ title }) => title)];
  const body = rows.map((row) => {
    const isOpen = row.name === opened;
    const button = el(
      "button",
      {
        type: "button",
        class: "term",
        "aria-expanded": String(isOpen),
        "aria-controls": "term-details",
      },
      chip(row.color),
      row.label,
    );
    const line = el("tr", { class: isOpen ? "opened" : null, onclick: () => open(row.name) });
    line.dataset.name = row.name;
    line.append(el("th", { scope: "row" }, button));
    for (const { title, cell } of columns) {
      const field = cell(row);
      field.dataset.title = title; // shown where the head is not, on a phone
      line.append(field);
    }
    return line;
  });
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${heading}s` },
    el(
      "table",
      { class: "terms" },
      el("caption", { class: "sr-only" }, caption),
      el("thead", {}, el("tr", {}, head.map((title) => el("th", { scope: "col" }, title)))),
      el("tbody", {}, body),
    ),
  );
}

const textCell = (text) => el(
  "td",
  { class: text && text !== "–" ? "number" : "empty" },
  text || "–",
);

function valueCell(row) {
  const heldOut = row.held_out ? el("span", { class: "soft" }, `held-out ${row.held_out.text}`) : null;
  const texts = el("span", { class: "lines" }, el("span", {}, row.value?.text ?? "–"), heldOut);
  return el("td", { class: "value" }, row.spark ? sparkline(row.spark, row.color) : null, texts);
}

function sparkline({ steps, values }, color) {
  const known = values.filter(isNumber);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const { width, height } = SPARK;
  const x = (step) => 2 + ((step - steps[0]) / (steps.at(-1) - steps[0] || 1)) * (width - 6);
  const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  const points = steps.map((step, at) => [step, values[at]]).filter(([, value]) => isNumber(value));
  if (!points.length) return null;
  const path = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const [lastStep, lastValue] = points.at(-1);
  const picture = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    svg("polyline", { points: path }),
    svg("circle", { cx: x(lastStep).toFixed(1), cy: y(lastValue).toFixed(1), r: 2 }),
  );
  picture.style.color = getColour(color);
  return picture;
}

const getColour = (color) => chip(color).style.background;

function weightCell(row) {
  const { bound, weight } = row;
  const isMet = bound?.met;
  return el(
    "td",
    { class: bound || weight ? "weight" : "empty" },
    bound
      ? el(
        "span",
        { class: isMet ? "met" : "unmet", title: bound.text_met },
        `${isMet ? "✓" : "✗"} ${bound.text}`,
      )
      : null,
    weight ? el("span", { class: bound ? "soft" : null }, bound ? `weight ${weight.text}` : weight.text) : bound ? null : "–",
  );
}

function shareCell(row) {
  if (!isNumber(row.share)) return textCell(row.texts.share);
  const bar = el("i", { class: "meter", "aria-hidden": "true" }, el("i"));
  bar.firstChild.style.width = `${Math.round(Math.max(0, Math.min(1, row.share)) * 100)}%`;
  bar.firstChild.style.background = getColour(row.color);
  return el("td", { class: "bar-cell" }, bar, el("span", {}, row.texts.share));
}

// A bar from the middle: to the left if the gradients are opposed.
function cosineCell(row) {
  if (!isNumber(row.cosine)) return textCell(row.texts.cosine);
  const bar = el("i", { class: "meter balanced", "aria-hidden": "true" }, el("i"));
  const size = Math.min(1, Math.abs(row.cosine)) * 50;
  bar.firstChild.style.width = `${size}%`;
  bar.firstChild.style.left = `${row.cosine < 0 ? 50 - size : 50}%`;
  bar.firstChild.style.background = row.cosine < 0 ? "var(--against)" : "var(--with)";
  return el(
    "td",
    { class: "bar-cell" },
    bar,
    el("span", {}, row.texts.cosine ?? formatNumber(row.cosine)),
  );
}

function findingCell(row) {
  return el(
    "td",
    { class: row.finding || row.skipped ? "finding-cell" : "empty" },
    row.finding ? el("mark", { class: row.finding.severity }, row.finding.rule) : null,
    row.skipped ? el("mark", { class: "warning", title: row.skipped }, row.skipped) : null,
    !row.finding && !row.skipped ? "–" : null,
  );
}
