// Texts of a run: findings, samples, answers, driving examples, skipped terms, config and log.

import { chip, el, formatNumber, numberCell, table } from "./dom.js";

const note = (text) => el("p", { class: "note" }, text);
const NONE_YET = "None yet.";

// What the doctor says: what lasts, the worst first, and below it what has ended.
export function findingsList(findings) {
  const item = (finding) => {
    const isOver = finding.ended !== null;
    const steps = isOver ? `steps ${finding.step} to ${finding.ended}` : `since step ${finding.step}`;
    const kind = isOver ? "over" : finding.severity;
    return el(
      "li",
      { class: kind },
      el(
        "details",
        {},
        el(
          "summary",
          {},
          el("mark", { class: kind }, kind),
          el("strong", {}, finding.rule),
          ` ${finding.what} `,
          el("span", { class: "soft" }, steps),
        ),
        el(
          "dl",
          {},
          [
            ["evidence", finding.evidence],
            ["cause", finding.cause],
            ["cure", finding.cure],
          ]
            .filter(([, text]) => text)
            .map(([word, text]) => el("div", {}, el("dt", {}, word), el("dd", {}, text))),
        ),
      ),
    );
  };
  return el("ul", { class: "findings" }, findings.map(item));
}

export function skippedTable(skipped) {
  return table(
    [
      "term",
      { title: "steps", class: "number" },
      { title: "last step", class: "number" },
      "reason",
    ],
    skipped.map((entry) =>
      el(
        "tr",
        {},
        el("td", {}, entry.term),
        numberCell(entry.count),
        numberCell(entry.last_step),
        el("td", {}, entry.reason || "–"),
      ),
    ),
  );
}

export function samplesView({ headings, prompts, whole }) {
  if (!prompts.length) return [note(NONE_YET)];
  const articles = prompts.map(({ prompt, answers }) =>
    el(
      "article",
      { class: "sample" },
      el("h3", { class: "prompt", dir: "auto" }, prompt),
      el(
        "div",
        { class: "answers" },
        headings.map((heading) =>
          el(
            "div",
            {},
            el("h4", {}, heading),
            el(
              "p",
              { dir: "auto" },
              answers[heading] === undefined ? "–" : answers[heading].trim() ? answers[heading] : "(empty)",
            ),
          ),
        ),
      ),
    ),
  );
  return [whole === false ? note("The last ones only.") : null, ...articles];
}

function answerBox(heading, { text, reward, rewards }) {
  const parts = Object.entries(rewards).map(([name, value]) => `${name} ${formatNumber(value)}`);
  const sum = `reward ${formatNumber(reward)}${parts.length > 1 ? `: ${parts.join(", ")}` : ""}`;
  return el(
    "div",
    {},
    el("h4", {}, heading, el("span", { class: "soft" }, ` ${sum}`)),
    el("p", { dir: "auto" }, text.trim() ? text : "(empty)"),
  );
}

// Best and worst answers, those to held-out prompts, and the latest ones.
export function answersView({ extremes, held_out: heldOut, sampled, latest, whole }) {
  if (!extremes.length && !heldOut.length && !latest.length) return [note(NONE_YET)];
  const article = (prompt, step, ...boxes) =>
    el(
      "article",
      { class: "sample" },
      el(
        "h3",
        { class: "prompt", dir: "auto" },
        prompt,
        step === null ? null : el("span", { class: "soft" }, ` step ${step}`),
      ),
      el("div", { class: "answers" }, boxes),
    );
  return [
    heldOut.length ? el("h3", {}, "Answers to held-out prompts, before and after") : null,
    heldOut.length ? note(heldOutNote(sampled)) : null,
    ...heldOut.map(({ prompt, before, after }) =>
      article(prompt, null, before && answerBox("before", before), answerBox("after", after)),
    ),
    extremes.length ? el("h3", {}, "Best and worst answers over time") : null,
    ...extremes.map(({ step, prompt, best, worst }) =>
      article(prompt, step, answerBox("best", best), answerBox("worst", worst)),
    ),
    latest.length ? latestAnswers(latest, whole) : null,
  ];
}

const heldOutNote = (sampled) =>
  `${sampled ? "The first of the sampled answers" : "The most likely answer"} to prompts that are ` +
  "not trained on, at the first and the last evaluation.";

function latestAnswers(latest, whole) {
  const rows = latest.map((answer) =>
    el(
      "tr",
      {},
      el("td", { class: "number" }, `${answer.step ?? "?"}${answer.held_out ? ", held out" : ""}`),
      el("td", { class: "prose", dir: "auto" }, promptText(answer.prompt)),
      el("td", { class: "prose", dir: "auto" }, answer.answer ?? ""),
      el("td", {}, rewardTexts(answer.rewards)),
      numberCell(answer.reward),
      numberCell(answer.advantage),
    ),
  );
  const number = (title) => ({ title, class: "number" });
  return el(
    "details",
    {},
    el("summary", {}, `The latest ${latest.length} answers${whole === false ? " only" : ""}`),
    el(
      "div",
      { class: "scroll" },
      table(
        [number("step"), "prompt", "answer", "rewards", number("sum"), number("advantage")],
        rows,
      ),
    ),
  );
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// A prompt is a text, or a chat: its messages with their roles.
function promptText(prompt) {
  if (!Array.isArray(prompt)) return asText(prompt ?? "");
  return prompt.map((message) => `${message?.role ?? ""}: ${asText(message?.content ?? "")}`).join("\n");
}

const rewardTexts = (rewards) =>
  Object.entries(rewards ?? {})
    .map(([name, value]) => `${name} ${formatNumber(value)}`)
    .join(", ");

// The examples with the largest share of a term's gradient at one of the steps; of all terms
// without a name.
export function driversView({ steps }, name = null) {
  const known = steps
    .map(({ step, terms }) => ({
      step,
      terms: terms.filter((term) => name === null || term.name === name),
    }))
    .filter(({ terms }) => terms.length);
  if (!known.length) return [note(NONE_YET)];
  const box = el("div", { class: "driven" });
  const show = (step) => {
    const { terms } = known.find((entry) => String(entry.step) === String(step));
    box.replaceChildren(...terms.map((term) => drivenTerm(term, name === null)));
  };
  const select = el(
    "select",
    { autocomplete: "off", onchange: () => show(select.value) },
    known.map(
      ({ step }, at) => el("option", { value: step, selected: at === known.length - 1 }, step),
    ),
  );
  show(known.at(-1).step);
  return [
    el(
      "p",
      { class: "driver-legend" },
      el("label", {}, "Step ", select),
      el(
        "span",
        { class: "soft" },
        "The deeper a token's colour, the larger its share of the gradient among those shown; ",
      ),
      el("span", { class: "token strong" }, "underlined"),
      el("span", { class: "soft" }, ": at least half of the largest."),
    ),
    box,
  ];
}

function drivenTerm({ label, color, grad_norm: norm, examples }, hasName) {
  return el(
    "article",
    {},
    hasName ? el("h3", {}, chip(color), label, norm === null ? null : el("span", { class: "soft" }, ` gradient norm ${formatNumber(norm)}`)) : null,
    examples.map(({ source, text, tokens }) =>
      el(
        "div",
        { class: "example" },
        el("span", { class: "source" }, el("strong", {}, text), ` ${source}`),
        el("p", { class: "tokens", dir: "auto" }, tokens.map(drivingToken)),
      ),
    ),
  );
}

function drivingToken([text, depth, title]) {
  if (!depth) return text;
  const token = el("span", { class: depth >= 0.5 ? "token strong" : "token", title }, text);
  token.style.setProperty("--depth", `${Math.round(depth * 62)}%`);
  return token;
}

export function configView({ different, sections, text, whole }) {
  const changed = different.length
    ? table(
        ["setting", "here", "default"],
        different.map(({ key, value, default: usual }) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, key),
            el("td", {}, value),
            el("td", { class: "soft" }, usual),
          ),
        ),
        { class: "settings" },
      )
    : note("Everything is at its default.");
  const cards = sections.map(({ title, color, settings }) =>
    el(
      "section",
      { class: "settings-card" },
      el("h3", {}, color === null ? null : chip(color), title),
      el(
        "dl",
        {},
        settings.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))),
      ),
    ),
  );
  return [
    el("div", { class: "scroll" }, changed),
    cards.length || text
      ? el(
        "details",
        {},
        el("summary", {}, "The whole config"),
        el("div", { class: "settings-cards" }, cards),
        whole === false || !text ? null : el(
          "details",
          {},
          el("summary", {}, "as JSON"),
          el("pre", {}, text),
        ),
      )
      : null,
  ];
}

export function logView({ text, whole }) {
  if (!text) return [note(NONE_YET)];
  return [whole ? null : note("The end of the log only."), el("pre", { class: "log" }, text)];
}
