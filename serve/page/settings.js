// The controls under the question, and the fields of a request that they make.

import { element } from "./answer.js";
import { exitInWords, number } from "./words.js";

const byId = (id) => document.getElementById(id);
const EFFORTS = ["minimal", "low", "medium", "high"];
// states that still move by this much of themselves in a loop end `converge` and `accel` at once
const LARGEST_EPS = 1;
const DECADES = 3;

export class Settings {
  #about = {};

  constructor() {
    this.#fillExits();
    byId("threshold").addEventListener("input", () => {
      byId("exit").value = "slider";
    });
    byId("ask").addEventListener("input", () => this.#showChosen());
    byId("depth-numbers").addEventListener("change", (event) => {
      document.body.classList.toggle("depth-numbers", event.target.checked);
    });
    this.#showChosen();
  }

  /** Takes over the server's description of its model. */
  know(about) {
    this.#about = about;
    this.#fillExits();
    const own = { qexit: about.exit?.q, margin: about.exit?.theta }[about.exit?.mode];
    if (own != null) byId("threshold").value = own;
    if (about.context) byId("max-tokens").max = about.context;
    byId("hand-up-field").hidden = !about.ladder;
    this.#showChosen();
  }

  /** Fields of a request. */
  request() {
    const fields = {};
    const sigma0 = {};
    const chosen = byId("exit").value;
    const afterExit = byId("after-exit").value;
    let exit = null;
    if (chosen === "slider") exit = this.#fromSlider();
    else if (chosen === "own" && afterExit) exit = this.#about.exit ?? {};
    else if (chosen !== "own") {
      // an exit setting wins over an effort, so an effort with other skipped loops is sent as what it stands for
      const stands = this.#effortExit(chosen);
      if (afterExit && stands) exit = stands;
      else fields.reasoning_effort = chosen;
    }
    if (exit) sigma0.exit = afterExit ? { ...exit, after_exit: afterExit } : exit;
    if (this.#about.ladder && byId("hand-up").checked) sigma0.ladder = "token";
    if (Object.keys(sigma0).length) fields.sigma0 = sigma0;
    const most = byId("max-tokens").valueAsNumber;
    if (most >= 1) fields.max_tokens = Math.floor(most);
    return fields;
  }

  #effortExit(name) {
    const efforts = this.#about.efforts;
    return Array.isArray(efforts) ? null : (efforts?.[name] ?? null);
  }

  #fromSlider() {
    const share = byId("threshold").valueAsNumber;
    const own = this.#about.exit ?? { mode: "qexit" };
    // the server takes thresholds above 0 only
    const threshold = Math.max(0.01, share);
    if (own.mode === "qexit") return { ...own, q: threshold };
    if (own.mode === "margin") return { ...own, theta: threshold };
    if (own.mode === "converge" || own.mode === "accel") {
      return { ...own, eps: Number((LARGEST_EPS * 10 ** (-DECADES * share)).toPrecision(2)) };
    }
    const loops = this.#about.total_loops ?? 1;
    return { ...own, mode: "fixed", depth: 1 + Math.round(share * (loops - 1)) };
  }

  #fillExits() {
    const kept = byId("exit").value || "own";
    const known = this.#about.efforts;
    const efforts = Array.isArray(known) ? known : known ? Object.keys(known) : EFFORTS;
    const own = this.#about.exit ? `own setting (${exitInWords(this.#about.exit)})` : "own setting";
    const options = [
      ["own", own],
      ...efforts.map((effort) => [effort, `effort: ${effort}`]),
      ["slider", "slider"],
    ];
    byId("exit").replaceChildren(
      ...options.map(([value, text]) => {
        const option = element("option", "", text);
        option.value = value;
        return option;
      }),
    );
    byId("exit").value = kept;
  }

  #showChosen() {
    const slider = byId("exit").value === "slider";
    const value = exitInWords(this.#fromSlider());
    byId("threshold-value").textContent = slider ? value : "not in use";
    byId("threshold").setAttribute("aria-valuetext", slider ? value : `${number(byId("threshold").value)}, not in use`);
    byId("threshold").classList.toggle("unused", !slider);
    byId("settings-line").textContent = [
      slider ? value : byId("exit").selectedOptions[0]?.textContent,
      byId("after-exit").value,
      `${byId("max-tokens").value} tokens`,
      this.#about.ladder && byId("hand-up").checked ? "hand up" : "",
    ]
      .filter(Boolean)
      .join(" · ");
  }
}
