// The page at /: a chat with every sampling control, and a view of the engine. No dependencies.

const POLL_MS = 1000;
const RATE_POINTS = 120;
const PAUSE_SHARE = 0.03;
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

function count(value, noun) {
  return `${number.format(value)} ${noun}${value === 1 ? "" : "s"}`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The server

class Failure extends Error {}

async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error.message; } catch { /* no body of ours */ }
  throw Object.assign(new Failure(message || response.statusText), { status: response.status });
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}

// The sampling controls

let controls = [];

function field(control) {
  const id = `control-${control.name}`;
  let input;
  if (control.kind === "flag" || control.kind === "choice") {
    const options = control.kind === "flag" ? [true, false] : control.options;
    input = element("select", {}, element("option", { value: "" }, "default"));
    for (const value of options) {
      const text = value === true ? "yes" : value === false ? "no" : value;
      input.append(element("option", { value: JSON.stringify(value) }, text));
    }
  } else if (["lines", "json", "area"].includes(control.kind)) {
    input = element("textarea", { rows: 2, spellcheck: "false" });
  } else {
    const isNumber = control.kind === "number" || control.kind === "integer";
    input = element("input", { type: isNumber ? "number" : "text" });
    for (const name of ["min", "max"]) {
      if (control[name] !== undefined) input.setAttribute(name, control[name]);
    }
    if (isNumber) input.setAttribute("step", control.step ?? 1);
  }
  if (control.example) input.placeholder = control.example;
  input.id = id;
  input.name = control.name;
  input.value = control.value ?? "";
  input.setAttribute("aria-describedby", `${id}-help`);
  return element(
    "div", { class: "control" },
    element("label", { for: id }, control.name),
    input,
    element("div", { class: "quiet", id: `${id}-help` }, control.help),
  );
}

async function buildControls() {
  const groups = await (await fetch("web/controls.json")).json();
  controls = groups.flatMap((group) => group.controls);
  for (const group of groups) {
    const grid = element("div", { class: "grid" }, ...group.controls.map(field));
    const details = element("details", {}, element("summary", {}, group.title), grid);
    details.open = Boolean(group.open);
    $("controls").append(details);
  }
}

const built = buildControls().catch(showError);

function resetControls() {
  for (const control of controls) $(`control-${control.name}`).value = control.value ?? "";
  $("system").value = "";
}

/** What the controls say, by name; throws a Failure that names the one that can't be read. */
function readControls() {
  const found = {};
  for (const control of controls) {
    const text = $(`control-${control.name}`).value;
    if (text.trim() === "") continue;
    found[control.name] = readControl(control, text);
  }
  return found;
}

function readControl(control, text) {
  const refuse = (what) => { throw new Failure(`${control.name}: ${what}`); };
  const numberOf = (part) => {
    const value = Number(part);
    return Number.isFinite(value) ? value : refuse(`${part.trim()} is no number`);
  };
  switch (control.kind) {
    case "number": case "integer": return numberOf(text);
    case "flag": case "choice": return JSON.parse(text);
    case "lines": return text.split("\n").filter((line) => line !== "");
    case "ids": return text.split(/[\s,]+/).filter(Boolean).map(numberOf);
    case "json":
      try { return JSON.parse(text); } catch (error) { return refuse(`is no JSON (${error.message})`); }
    default: return text;
  }
}

// The chat

let history = [];
let running = null;

function addMessage(role, text, index = 0) {
  const body = element("div", { class: "text" });
  body.textContent = text;
  const who = role === "user" ? "You" : index ? `Assistant, choice ${index + 1}` : "Assistant";
  const made = element(
    "div", { class: `message ${role}` }, element("div", { class: "who" }, who), body,
  );
  $("messages").append(made);
  scrollDown();
  return made;
}

function scrollDown() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

/** What has come of one choice, and where it is shown. */
class Answer {
  constructor(index) {
    this.text = "";
    this.thought = "";
    this.logprobs = [];
    this.reason = null;
    this.calls = "";
    this.shown = addMessage("assistant", "", index);
  }

  take(part, choice) {
    this.text += part.content ?? "";
    this.thought += part.reasoning_content ?? "";
    if (part.tool_calls) this.calls += JSON.stringify(part.tool_calls);
    if (choice.logprobs?.content) this.logprobs.push(...choice.logprobs.content);
    this.reason = choice.finish_reason ?? this.reason;
    this.show();
  }

  show() {
    this.shown.querySelector(".text").textContent = this.text + this.calls;
    if (this.thought) {
      if (!this.shown.querySelector(".thought")) {
        this.shown.querySelector(".who").after(element("div", { class: "thought" }));
      }
      this.shown.querySelector(".thought").textContent = this.thought;
    }
  }

  end() {
    if (this.reason && this.reason !== "stop") {
      this.shown.querySelector(".who").append(` — ended by ${this.reason}`);
    }
    if (!this.logprobs.length) return;
    const rows = this.logprobs.map((one) => element(
      "tr", {},
      element("td", {}, JSON.stringify(one.token)),
      element("td", {}, one.logprob.toFixed(3)),
      element("td", {}, (one.top_logprobs ?? []).map(
        (other) => `${JSON.stringify(other.token)} ${other.logprob.toFixed(2)}`).join("  ")),
    ));
    this.shown.append(element(
      "details", {}, element("summary", {}, "Log-probabilities"),
      element("table", {}, element("tbody", {}, ...rows)),
    ));
  }
}

function showSpeed(tokens, started, first, ended) {
  if (!first || !tokens) { $("speed").textContent = "waiting for the first token"; return; }
  const now = ended ?? performance.now();
  const seconds = (now - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const parts = [`${number.format(tokens)} tokens`, rate, `first after ${Math.round(first - started)} ms`];
  $("speed").textContent = parts.filter(Boolean).join(" · ");
}

async function send(text) {
  const system = $("system").value.trim();
  const said = history; // a new chat has its own
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said, { role: "user", content: text },
  ];
  const body = { messages, stream: true, ...readControls() };
  if (body.stream) {
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
  }
  running = new AbortController();
  setBusy(true);
  addMessage("user", text);
  const answers = new Map();
  const answer = (index) => {
    if (!answers.has(index)) answers.set(index, new Answer(index));
    return answers.get(index);
  };
  answer(0);
  const started = performance.now();
  let first = 0, tokens = 0, stopped = false, next = $("prompt");
  showSpeed(0, started, 0);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST", signal: running.signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json" },
    });
    if (body.stream) {
      for await (const event of events(response)) {
        if (event.error) throw new Failure(event.error.message);
        for (const choice of event.choices) answer(choice.index).take(choice.delta, choice);
        tokens = event.usage?.completion_tokens ?? tokens;
        if (tokens && !first) first = performance.now();
        showSpeed(tokens, started, first);
        scrollDown();
      }
    } else {
      const whole = await response.json();
      for (const choice of whole.choices) answer(choice.index).take(choice.message, choice);
      tokens = whole.usage.completion_tokens;
      first = performance.now();
      const seconds = (first - started) / 1000;
      $("speed").textContent = `${number.format(tokens)} tokens in ${seconds.toFixed(2)} s`;
      if (whole.prompt_logprobs) showPrompt(answer(0), whole.prompt_logprobs);
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) showError(error);
    if (error.status === 401) next = $("key");
    answer(0).reason ??= stopped ? "you" : "an error";
  }
  if (said !== history || !tokens) $("speed").textContent = "";
  else if (body.stream) showSpeed(tokens, started, first, performance.now());
  for (const one of answers.values()) one.end();
  if (answer(0).text || stopped) {
    said.push({ role: "user", content: text }, { role: "assistant", content: answer(0).text });
  } else {
    $("prompt").value ||= text;
  }
  running = null;
  setBusy(false);
  next.focus();
}

function showPrompt(answer, logprobs) {
  const text = element("pre", { class: "quiet" });
  text.textContent = JSON.stringify(logprobs, null, 1);
  answer.shown.append(
    element("details", {}, element("summary", {}, "The prompt's log-probabilities"), text));
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

function showError(error) {
  $("error").textContent = error?.message ?? "";
}

async function submit() {
  await built;
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  showError(null);
  try {
    readControls();
  } catch (error) {
    showError(error);
    return;
  }
  $("prompt").value = "";
  await send(text);
}

// The engine

let rates = [];
let last = null;
let polling = true;

function tile(name, value) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value));
}

function share(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)}\u00a0%` : "–";
}

function showEngine(state) {
  const { stats } = state;
  if (last && state.now_s > last.now_s && stats.generated_tokens >= last.stats.generated_tokens) {
    const made = stats.generated_tokens - last.stats.generated_tokens;
    rates = [...rates, made / (state.now_s - last.now_s)].slice(-RATE_POINTS);
  }
  last = state;
  const rate = rates.at(-1) ?? 0;
  $("tiles").replaceChildren(
    tile("running", number.format(stats.num_running)),
    tile("waiting", number.format(stats.num_waiting)),
    tile("tokens/s", number.format(Math.round(rate))),
    tile("cache hits", share(stats.cached_tokens, stats.prompt_tokens)),
    tile("preempted", number.format(stats.num_preemptions)),
    tile("steps", number.format(stats.num_steps)),
  );
  showRate();
  showPages(stats);
  showSteps(state.steps);
  showQueue(state.sequences, stats);
  showPrefixes(state.prefixes, stats);
}

function showRate() {
  const most = Math.max(1, ...rates);
  const points = rates.map(
    (rate, i) => `${600 - 5 * (rates.length - 1 - i)},${57 - 54 * rate / most}`);
  $("rate").replaceChildren(shape("polyline", { points: points.join(" ") }));
  const now = Math.round(rates.at(-1) ?? 0);
  $("rate").setAttribute("aria-label", `${now} tokens a second now`);
  $("rate-text").textContent = rates.length ? `top: ${number.format(Math.round(most))} tokens/s` : "";
}

function showPages(stats) {
  const parts = { used: stats.pages_used, cached: stats.pages_cached };
  $("pages").replaceChildren(...Object.entries(parts).map(([name, count]) => {
    const part = element("div", { class: name });
    part.style.width = `${100 * count / Math.max(1, stats.pages_total)}%`;
    return part;
  }));
  const free = stats.pages_total - stats.pages_used - stats.pages_cached;
  const used = `${number.format(stats.pages_used)} in use`;
  const cached = `${number.format(stats.pages_cached)} cached`;
  const rest = `${number.format(free)} free of ${number.format(stats.pages_total)}`;
  $("pages").setAttribute("aria-label", [used, cached, rest].join(", "));
  const key = (name) => element("span", { class: `key ${name}` });
  $("pages-text").replaceChildren(key("decode"), `${used} `, key("mixed"), `${cached}, ${rest}`);
}

function showSteps(steps) {
  const busy = steps.reduce((sum, step) => sum + step.end_s - step.begin_s, 0);
  const longest = PAUSE_SHARE * busy; // that a pause is drawn as
  let end = steps[0]?.begin_s, at = 0;
  const places = steps.map((step) => {
    at += Math.min(step.begin_s - end, longest);
    const place = { step, at, width: step.end_s - step.begin_s };
    at += place.width;
    end = step.end_s;
    return place;
  });
  const scale = 1000 / Math.max(1e-6, at);
  $("steps").replaceChildren(...places.flatMap((place) => {
    const x = place.at * scale, whole = place.width * scale;
    const width = Math.max(1, whole > 8 ? whole - 1.5 : whole); // gaps would pale narrow ones
    const height = 84 * place.step.num_tokens / place.step.room;
    return [
      shape("rect", { x, width, y: 3, height: 84, class: "room" }),
      shape("rect", { x, width, y: 87 - height, height, class: place.step.kind }),
    ];
  }));
  const text = describeSteps(steps);
  $("steps").setAttribute("aria-label", text);
  $("steps-text").textContent = text;
}

function median(values) {
  return values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : 0;
}

function describeSteps(steps) {
  if (!steps.length) return "No step yet";
  const decode = steps.filter((step) => step.kind === "decode").length;
  const room = steps.reduce((sum, step) => sum + step.room, 0);
  const tokens = steps.reduce((sum, step) => sum + step.num_tokens, 0);
  const times = steps.map((step) => step.end_s - step.begin_s);
  const gaps = steps.map((step) => step.host_s).filter((gap) => gap !== null);
  return `The last ${steps.length} steps: ${decode} decode, ${steps.length - decode} mixed; `
    + `median ${(1000 * median(times)).toFixed(2)} ms a step, ${(1000 * median(gaps)).toFixed(2)} ms `
    + `of the host between two; ${share(room - tokens, room)} padding`;
}

function showQueue(sequences, stats) {
  $("queue").replaceChildren(...sequences.map((one) => element("tr", {}, ...[
    one.request_id, one.status, `${one.age_s.toFixed(1)} s`, number.format(one.num_prompt),
    number.format(one.num_cached), `${one.num_generated} of ${one.max_tokens}`,
    number.format(one.num_pages),
  ].map((text) => element("td", {}, text)))));
  const hidden = stats.num_running + stats.num_waiting - sequences.length;
  $("queue-text").textContent = !sequences.length ? "Nothing runs or waits"
    : hidden > 0 ? `and ${number.format(hidden)} more` : "";
}

function showPrefixes(prefixes, stats) {
  const shown = prefixes.runs.reduce((sum, run) => sum + run.pages, 0);
  const part = shown < prefixes.pages
    ? `; shown: the ${number.format(shown)} most often found by later requests` : "";
  $("prefix-text").textContent = `${count(prefixes.pages, "page")} in the tree${part}`;
  const most = Math.max(1, ...prefixes.runs.map((run) => run.pages));
  const lists = new Map([[0, element("ul")]]);
  for (const run of prefixes.runs) {
    const weight = element("span", { class: "weight", "aria-hidden": "true" });
    weight.style.width = `${8 * run.pages / most}rem`;
    const held = run.holders ? `, held by ${run.holders}` : "";
    const item = element(
      "li", run.holders ? {} : { class: "idle" }, weight,
      `${count(run.hits, "hit")} · ${count(run.tokens, "token")} in ${count(run.pages, "page")}${held}`,
    );
    if (run.text) item.append(element("q", {}, run.text));
    const list = element("ul");
    lists.set(run.id, list);
    item.append(list);
    (lists.get(run.above) ?? lists.get(0)).append(item);
  }
  for (const list of lists.values()) if (!list.children.length) list.remove();
  $("prefixes").replaceChildren(lists.get(0));
}

function showHealth(text, kind) {
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = `badge ${kind}`;
}

async function poll() {
  if (polling && document.visibilityState === "visible") {
    try {
      const state = await (await ask("engine_state")).json();
      $("model").textContent = `${state.model} on ${state.device}`;
      showHealth("running", "good");
      showEngine(state);
    } catch (error) {
      const text = error instanceof Failure ? error.message : "the server does not answer";
      showHealth(error.status === 401 ? "needs an API key" : text, "bad");
    }
  }
  setTimeout(poll, POLL_MS);
}

// Keys and buttons

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  $("messages").replaceChildren();
  $("speed").textContent = "";
  showError(null);
  $("prompt").focus();
});
$("reset").addEventListener("click", resetControls);
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("pause").addEventListener("click", () => {
  polling = !polling;
  $("pause").setAttribute("aria-pressed", String(!polling));
  $("pause").textContent = polling ? "Pause" : "Go on";
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  showError(null);
});
poll();
