// The settings beside the conversation: what a request says beside its messages.

import { byId, clone, store } from "./page.js";

// min and max are those of the slider; a number that is typed may be any, and the server says what
// it takes. Without `initial` the field is left to the model.
const SLIDERS = [
  { name: "max_tokens", label: "Maximum new tokens", min: 1, max: 2048, step: 1, initial: 512 },
  { name: "temperature", label: "Temperature", min: 0, max: 1.5, step: 0.01, middle: 0.7 },
  { name: "top_p", label: "Top_p", min: 0.01, max: 1, step: 0.01, middle: 0.8 },
  { name: "top_k", label: "Top_k", min: 1, max: 100, step: 1, middle: 40 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 1, max: 2, step: 0.01, middle: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
];

export class Settings {
  constructor() {
    this.system = byId("system");
    this.more = byId("more");
    this.error = byId("more-error");
    this.sliders = SLIDERS.map((each) => new Slider(each, byId("sliders")));
    byId("settings").addEventListener("input", () => this.save());
    byId("reset").addEventListener("click", () => this.reset());
    this.load();
  }

  // The fields of a request; null, and the error beside it, where the JSON is none.
  fields() {
    const fields = {};
    for (const slider of this.sliders) {
      if (slider.value !== null) fields[slider.name] = slider.value;
    }
    const more = this.moreFields();
    return more && { ...fields, ...more };
  }

  // The system prompt as a list of messages, of one or none.
  messages() {
    const content = this.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  // The most tokens that the model's length allows.
  setLength(length) {
    const slider = this.sliders[0];
    slider.setMax(length || SLIDERS[0].max);
  }

  moreFields() {
    this.error.hidden = true;
    if (!this.more.value.trim()) return {};
    try {
      const value = JSON.parse(this.more.value);
      if (value instanceof Object && !Array.isArray(value)) return value;
      this.error.textContent = "This must be a JSON object.";
    } catch (error) {
      this.error.textContent = `This is no JSON: ${error.message}.`;
    }
    this.error.hidden = false;
    this.more.closest("details").open = true;
    return null;
  }

  reset() {
    for (const slider of this.sliders) slider.reset();
    this.system.value = this.more.value = "";
    this.error.hidden = true;
    this.save();
  }

  save() {
    const numbers = Object.fromEntries(this.sliders.map((each) => [each.name, each.text]));
    const texts = { system: this.system.value, more: this.more.value };
    store.set("settings", { numbers, ...texts });
  }

  load() {
    const saved = store.get("settings");
    if (!saved) return;
    this.system.value = saved.system;
    this.more.value = saved.more;
    for (const slider of this.sliders) slider.text = saved.numbers[slider.name] ?? "";
  }
}

// A number, and a slider for it.
class Slider {
  constructor(rule, parent) {
    this.rule = rule;
    const row = clone("slider-template");
    const [label, number, range] = row.children;
    this.number = number;
    this.range = range;
    label.textContent = rule.label;
    label.htmlFor = number.id = rule.name;
    range.setAttribute("aria-label", `${rule.label}, slider`);
    number.min = range.min = rule.min;
    number.step = "any";
    range.step = rule.step;
    range.hidden = rule.max === undefined;
    this.setMax(rule.max);
    this.reset();
    number.addEventListener("input", () => this.show());
    range.addEventListener("input", () => (this.text = range.value));
    parent.append(row);
  }

  get name() {
    return this.rule.name;
  }

  // What the field holds; "" is the model's choice.
  get text() {
    return this.number.value;
  }

  set text(text) {
    this.number.value = text;
    this.show();
  }

  get value() {
    return this.text === "" ? null : Number(this.text);
  }

  reset() {
    this.text = this.rule.initial ?? "";
  }

  setMax(max) {
    if (max !== undefined) this.range.max = max;
    this.show();
  }

  show() {
    this.range.value = this.value ?? this.rule.middle ?? this.rule.min;
    this.range.classList.toggle("unset", this.value === null);
  }
}
