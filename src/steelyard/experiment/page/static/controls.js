// Controls of a run that is going on: pause, weights, bounds, switches and the learning rate.

import { el } from "./dom.js";

const GOING = ["running", "paused"];
const REFRESH_SECONDS = 3;

const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);

async function post(action, body) {
  const response = await fetch(`/api/${action}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(found.detail ?? `the server answered ${response.status}`);
  return found.settings;
}

export class RunControls {
  constructor(element, loadSettings) {
    this.element = element;
    this.loadSettings = loadSettings; // run -> promise of the settings
  }

  // Shown for one run that is going on; its inputs stay while somebody writes in them.
  async show(run) {
    const isGoing = run !== undefined && GOING.includes(run.state);
    if (!isGoing) {
      this.element.hidden = true;
      this.name = undefined;
      return;
    }
    if (this.name !== run.name) {
      this.name = run.name;
      this.settings = {};
      this.loaded = 0;
      this.build();
    }
    this.state = run.state;
    this.pause.textContent = run.state === "paused" ? "Continue" : "Pause";
    await this.refresh();
  }

  // `steelyard set` may change the run too; what somebody has begun to write stays.
  async refresh() {
    if (Date.now() - this.loaded < REFRESH_SECONDS * 1000) return;
    this.loaded = Date.now();
    const name = this.name;
    const settings = await this.loadSettings(name).catch(() => this.settings);
    // A run of another trainer has none, and cannot be paused from here.
    if (this.name === name) this.element.hidden = !Object.keys(settings).length;
    const isEdited = this.inputs.contains(document.activeElement) || this.hasChanges();
    if (this.name === name && !isEdited && !isSame(settings, this.settings)) this.fill(settings);
  }

  hasChanges() {
    return Object.keys(this.changed()).length > 0;
  }

  build() {
    this.pause = el("button", { type: "button", id: "pause", onclick: () => this.toggle() });
    this.answer = el("span", { class: "note", id: "change-answer", role: "status" });
    this.inputs = el("form", { id: "settings", onsubmit: (event) => this.send(event) });
    const fold = el("details", {}, el("summary", {}, "Change its settings"), this.inputs);
    this.element.replaceChildren(this.pause, fold, this.answer);
  }

  fill(settings) {
    this.settings = settings;
    const fields = Object.entries(settings).map(([key, value]) =>
      el(
        "label",
        {},
        key,
        typeof value === "boolean"
          ? el("input", { type: "checkbox", name: key, checked: value })
          : el("input", {
              type: "text",
              name: key,
              size: 8,
              value: typeof value === "number" ? value : JSON.stringify(value),
              autocomplete: "off",
            }),
      ),
    );
    this.inputs.replaceChildren(
      ...fields,
      el("button", { type: "submit", id: "apply" }, "Apply from the next step on"),
    );
  }

  // The settings that were changed; a text that is no JSON is sent as it is, and refused.
  changed() {
    const found = {};
    for (const input of this.inputs.querySelectorAll("input")) {
      let value = input.checked;
      if (input.type !== "checkbox") {
        try {
          value = JSON.parse(input.value);
        } catch {
          value = input.value;
        }
      }
      if (!isSame(value, this.settings[input.name])) found[input.name] = value;
    }
    return found;
  }

  async send(event) {
    event.preventDefault();
    const settings = this.changed();
    if (!this.hasChanges()) return this.say("Nothing was changed.");
    await this.ask("set", { settings }, "Taken from the next step on.");
  }

  async toggle() {
    const action = this.state === "paused" ? "continue" : "pause";
    await this.ask(action, {}, action === "pause" ? "It waits after its current step." : "");
  }

  async ask(action, body, answer) {
    const name = this.name;
    try {
      const settings = await post(action, { run: name, ...body });
      if (this.name !== name) return;
      if (action === "set") this.fill(settings);
      this.say(answer);
    } catch (error) {
      if (this.name === name) this.say(error.message, true);
    }
  }

  say(text, isError = false) {
    this.answer.textContent = text;
    this.answer.className = isError ? "warning" : "note";
  }
}
