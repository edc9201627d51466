// Texts of a run: tables of samples, rollouts, drivers and skipped terms; the log and the config.

import { el, formatNumber } from "./dom.js";

const number = (value) => el("td", { class: "number" }, formatNumber(value));

function table(titles, rows) {
  const head = el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

export function skippedTable(skipped) {
  return table(
    ["Term", "Steps", "Last step", "Reason"],
    skipped.map((each) =>
      el(
        "tr",
        {},
        el("td", {}, each.term),
        number(each.count),
        number(each.last_step),
        el("td", {}, each.reason || "–"),
      ),
    ),
  );
}

function samples({ records }) {
  return table(
    ["When", "Prompt", "Completion"],
    records.map((each) =>
      el(
        "tr",
        {},
        el("td", { class: "number" }, `${each.when ?? ""}, step ${each.step ?? "?"}`),
        el("td", {}, each.prompt ?? ""),
        el("td", {}, el("pre", {}, each.completion ?? "")),
      ),
    ),
  );
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// A prompt is a text, or a chat: its messages with their roles.
function promptText(prompt) {
  if (!Array.isArray(prompt)) return asText(prompt ?? "");
  return prompt.map((each) => `${each?.role ?? ""}: ${asText(each?.content ?? "")}`).join("\n");
}

function rollouts({ records }) {
  const rewards = (each) =>
    Object.entries(each.rewards ?? {})
      .map(([name, value]) => `${name} ${formatNumber(value)}`)
      .join(", ");
  return table(
    ["Step", "Prompt", "Answer", "Rewards", "Sum", "Advantage"],
    records.map((each) =>
      el(
        "tr",
        {},
        el("td", { class: "number" }, `${each.step ?? "?"}${each.held_out ? ", held out" : ""}`),
        el("td", { class: "prompt" }, promptText(each.prompt)),
        el("td", {}, el("pre", {}, each.answer ?? "")),
        el("td", {}, rewards(each)),
        number(each.reward),
        number(each.advantage),
      ),
    ),
  );
}

// The deeper the colour of a token, the larger its share of the term's gradient.
function drivers({ records }) {
  return table(
    ["Term", "Line", "Share", "Tokens"],
    records.flatMap((record) =>
      record.data.map((datum) => {
        const most = Math.max(1e-12, ...datum.tokens.map(([, share]) => share ?? 0));
        const tokens = datum.tokens.map(([text, share]) => {
          const token = el("span", share === null ? {} : { title: formatNumber(share) }, text);
          if (share)
            token.style.background = `rgb(var(--drive) / ${Math.round((share / most) * 60)}%)`;
          return token;
        });
        return el(
          "tr",
          {},
          el("td", {}, `${record.term}, step ${record.step}`),
          el("td", { class: "number" }, datum.line ?? "–"),
          number(datum.share),
          el("td", {}, el("pre", {}, ...tokens)),
        );
      }),
    ),
  );
}

const text = (found) => el("pre", {}, found.text);
const SHOW = { samples, rollouts, drivers, log: text, config: text };
export const RECORDS = {
  samples: "Samples",
  rollouts: "Rollouts: the latest answers",
  drivers: "Which examples drive each term",
  log: "Log",
  config: "Config",
};

export function showRecords(kind, found) {
  const isEmpty = found.records ? found.records.length === 0 : found.text === "";
  if (isEmpty) return [el("p", { class: "note" }, "None yet.")];
  const cut = {
    rollouts: "The latest ones only.",
    samples: "The last ones only.",
    log: "The end of the log only.",
  }[kind];
  return [found.whole || !cut ? null : el("p", { class: "note" }, cut), SHOW[kind](found)].filter(
    Boolean,
  );
}
