// Elements with text: whatever comes from a run becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";
const PALETTE = 8;
const DASHES = [undefined, [2, 3], [8, 4], [8, 3, 2, 3]]; // of the lines whose colours repeat

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children
      .flat()
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))),
  );
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

export function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value).replace("-", "−");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

// Ticks of one axis have the digits that their distance needs, so that no two look the same.
export function formatTick(value, distance) {
  if (value === 0) return "0";
  let digits = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
  if (!Number.isInteger(Number((distance * 10 ** digits).toPrecision(9)))) digits += 1; // 0.25
  const isSmall = digits > 4 && Math.abs(value) < 1e-2;
  if (!isSmall && Math.abs(value) < 1e6) return value.toFixed(Math.min(digits, 12)).replace("-", "−");
  const leading = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  return value.toExponential(Math.max(0, Math.min(12, leading + digits))).replaceAll("-", "−");
}

export function formatAge(seconds) {
  if (seconds < 5) return "just now";
  for (const [unit, length] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  }
  return `${Math.floor(seconds)} s ago`;
}

export const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Name of the colour of a term or run with this index; "base" and "total" have their own.
export function colourName(index) {
  if (typeof index === "string") return index;
  return index === null || index === undefined ? "base" : `c${(index % PALETTE) + 1}`;
}

export const dashOf = (index) =>
  typeof index === "number" ? DASHES[Math.floor(index / PALETTE) % DASHES.length] : undefined;

// A small square in the colour of a term, a reward or a run.
export function chip(index) {
  const square = el("i", { class: "chip", "aria-hidden": "true" });
  square.style.background = `var(--${colourName(index)})`;
  return square;
}

export function download(name, content, type) {
  const address = URL.createObjectURL(
    content instanceof Blob ? content : new Blob([content], { type }),
  );
  el("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const csvField = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export function downloadCsv(name, rows) {
  const text = rows.map((row) => row.map(csvField).join(",")).join("\n");
  download(`${name}.csv`, `${text}\n`, "text/csv");
}

// A card with a heading, a body, and the buttons that save what it shows.
export function figureCard({ title, note, toCsv, toCanvas }, ...body) {
  const save = async () => {
    const blob = await new Promise((resolve) => toCanvas().toBlob(resolve, "image/png"));
    download(`${title}.png`, blob);
  };
  const button = (label, hint, action) =>
    el(
      "button",
      {
        type: "button",
        class: "save",
        title: hint,
        "aria-label": `${hint}: ${title}`,
        onclick: action,
      },
      label,
    );
  return el(
    "figure",
    { class: "card", "aria-label": title },
    el(
      "div",
      { class: "card-head" },
      el("h3", {}, title),
      button("PNG", "Save as a picture", save),
      button("CSV", "Save the numbers", () => downloadCsv(title, toCsv())),
    ),
    note ? el("p", { class: "note" }, note) : null,
    ...body,
  );
}

// The picture of a canvas with its title and a legend above it, on the background of the page.
export function pictureOf(canvas, title, lines) {
  const scale = window.devicePixelRatio || 1;
  const head = 46 * scale;
  const picture = el(
    "canvas",
    { width: canvas.width + 24 * scale, height: canvas.height + head + 12 * scale },
  );
  const context = picture.getContext("2d");
  context.fillStyle = colour("card");
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = colour("ink");
  context.font = `600 ${14 * scale}px system-ui, sans-serif`;
  context.fillText(title, 12 * scale, 20 * scale);
  context.font = `${11 * scale}px system-ui, sans-serif`;
  let left = 12 * scale;
  for (const { label, colour: name } of lines) {
    context.fillStyle = colour(name);
    context.fillRect(left, 32 * scale, 12 * scale, 3 * scale);
    context.fillStyle = colour("soft");
    context.fillText(label, left + 16 * scale, 37 * scale);
    left += context.measureText(label).width + 30 * scale;
  }
  context.drawImage(canvas, 12 * scale, head);
  return picture;
}

// A table with a head; a heading is a text, or {title, class}; rows are elements.
export function table(headings, rows, { caption, ...attributes } = {}) {
  const head = headings.map((heading) =>
    typeof heading === "string"
      ? el("th", { scope: "col" }, heading)
      : el("th", { scope: "col", class: heading.class }, heading.title),
  );
  return el(
    "table",
    attributes,
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows),
  );
}

export const numberCell = (value) => el("td", { class: "number" }, formatNumber(value));
