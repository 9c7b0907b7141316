// The content of the tab, from the pack's routes and events.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { ask } from "./ask.mjs";
import { acting, button, bytes, copyButton, fill, kept, make, reason, seconds, style, table, terms } from "./elements.mjs";
import { graphs, jumpTo, set, titleOf } from "./jump.mjs";
import { offer, pauseButton, pausedCards } from "./paused.mjs";
import { ENDS, isOpen } from "./runs.js";

let changed; // asks about the graph
const SETTLED = 700; // ms without a change, then it asks
const ACTS = /RecordAudio|Webcam|Painter|Load3D/; // upload when a prompt is made

/** A part of the tab with a heading; `fill` replaces its content. */
function part(title, open = true) {
  const body = make("div", { class: "anygpu-body" }, make("p", {}, "…"));
  const element = make("details", open ? { open: "" } : {}, make("summary", {}, make("h2", {}, title)), body);
  return { element, fill: (...children) => fill(body, children) };
}

const unfolded = new Set(); // what the user has opened stays open when the graph is shown anew

function folded(key, summary, ...children) {
  const ontoggle = ({ target }) => (target.open ? unfolded.add(key) : unfolded.delete(key));
  return make("details", { open: unfolded.has(key) ? "" : null, ontoggle }, make("summary", {}, summary), children);
}

const trouble = (text) => make("p", { class: "anygpu-bad", role: "status" }, text);

function meter({ name, free, total }) {
  if (!total) return make("p", {}, `${name}: ${free === null ? "memory unknown" : `${bytes(free)} free`}`);
  const used = free === null ? 0 : total - free;
  const text = free === null ? `${bytes(total)}, free unknown` : `${bytes(used)} of ${bytes(total)} in use`;
  const values = { role: "meter", "aria-label": `Memory of ${name}`, "aria-valuemin": 0, "aria-valuemax": total };
  const level = make("div", {});
  level.style.width = `${(100 * used) / total}%`;
  const bar = make("div", { ...values, class: "anygpu-meter", "aria-valuenow": used, "aria-valuetext": text }, level);
  return make("div", {}, make("p", {}, make("b", {}, name), ` ${text}`), bar);
}

const meters = ({ device, host, shared }) => [meter(device), !shared && meter({ ...host, name: "host" })];

const WORD = { green: "ok", amber: "note", red: "problem", grey: "not tested" };

function lightRow({ name, colour, verdict, advice }) {
  const dot = make("span", { class: `anygpu-dot anygpu-${colour}`, "aria-hidden": "true" });
  return make("li", {}, dot, make("div", {}, make("b", {}, name), ` ${WORD[colour]}: ${verdict}`, reason(advice)));
}

function lightList(lights) {
  const by = (colour) => lights.filter((light) => light.colour === colour);
  const list = (some) => make("ul", { class: "anygpu-lights" }, some.map(lightRow));
  const shown = [...by("red"), ...by("amber")];
  const rest = [...by("green"), ...by("grey")];
  const count = `${by("green").length} ok, ${by("amber").length} notes, ${by("red").length} problems, ${by("grey").length} not tested`;
  return [
    make("p", {}, make("b", {}, "Probes"), ` ${count}`),
    shown.length > 0 && list(shown),
    rest.length > 0 && make("details", {}, make("summary", {}, `${rest.length} more`), list(rest)),
  ];
}

const choices = (decisions) => terms(decisions.map(({ subject, verdict, why }) => [subject, verdict, why]));

const section = ({ heading, lines }) => make("details", {}, make("summary", {}, heading), choices(lines));

const goButton = (id) => button(titleOf(id), () => jumpTo(id));

/** A line of advice, with a button where it changes a widget. */
function adviceLine({ text, node, input, value }) {
  const act = () => {
    set(node, input, value);
    changed(); // core tells none while it loads
  };
  const apply = node && button("Apply", act, { title: `${input} = ${value}: ${titleOf(node)}` });
  return make("p", { class: "anygpu-why" }, text, " ", apply);
}

function three({ found, expected, fix }) {
  const rows = [["Found", found], ["Expected", expected], ["Do", fix]].filter(([, text]) => text);
  return terms(rows, { class: "anygpu-bad" });
}

const LIGHT = { fits: "green", "in parts": "green", streams: "amber", "too much": "red" };
const worstOf = (stages) => ["too much", "streams", "in parts", "fits"].find((way) => stages.some(({ fits }) => fits === way));

/** A bar per stage against the free memory. */
function bars(stages) {
  const scale = Math.max(...stages.flatMap(({ peak, free }) => [peak, free ?? 0]), 1);
  return stages.map(({ stage, peak, free, fits }) => {
    const level = make("div", { class: `anygpu-${LIGHT[fits] ?? "grey"}` });
    level.style.width = `${(100 * peak) / scale}%`;
    const bar = make("div", { class: "anygpu-bar", role: "img", "aria-label": `${stage}: ${bytes(peak)} of ${bytes(free)} free` }, level);
    if (free !== null) {
      const mark = make("i", {});
      mark.style.left = `${(100 * free) / scale}%`;
      bar.append(mark);
    }
    return make("div", { class: "anygpu-stage" }, make("span", {}, stage), bar, make("span", {}, `${bytes(peak)}${fits ? `, ${fits}` : ""}`));
  });
}

const headlines = new Map(); // node -> its line in the tab, and the forecast that it holds before a run

/** While a node runs, its own estimate stands for the forecast. */
function follow(node, { done, status, left = "" }) {
  const [line, headline] = headlines.get(node) ?? [];
  if (line) line.textContent = done || !status ? headline : status + left;
}

/** The verdict on one run: a line, a bar per stage, and what the words mean. */
function runForecast({ node, found, stages = [], headline, verdict, advice = [], error }) {
  const dot = make("span", { class: `anygpu-dot anygpu-${error ? "red" : LIGHT[worstOf(stages)] ?? "grey"}`, "aria-hidden": "true" });
  const rows = stages.map(({ stage, peak, least, free, fits }) => [stage, bytes(peak), bytes(least), bytes(free), fits]);
  const line = make("b", {}, headline);
  headlines.set(String(node), [line, headline]);
  return [
    error ? three(error) : make("p", { class: "anygpu-verdict" }, dot, line),
    bars(stages),
    advice.map(adviceLine),
    stages.length > 0 &&
      folded(
        `numbers ${node}`,
        `Forecast of ${titleOf(node)}${found ? `: ${found}` : ""}`,
        table(["stage", "peak", "at least", "free", ""], rows),
        verdict && make("p", { class: "anygpu-lines" }, verdict),
      ),
  ];
}

function pipelineCard(card, forecasts) {
  if (card.error) return make("article", {}, make("h3", {}, card.model || "Load node"), goButton(card.node), three(card.error));
  return make(
    "article",
    {},
    make("h3", {}, `${card.title}: ${card.model}`),
    forecasts.filter(({ loader }) => loader === card.node).map(runForecast),
    folded(
      `choices ${card.node}`,
      "What AnyGPU chose, and why",
      make("p", {}, `${card.does} `, goButton(card.node)),
      choices(card.decisions),
      card.by_tables && make("p", { class: "anygpu-why" }, "From the tables: some probes have not run on this device yet."),
    ),
  );
}

function runCard([id, { stages, status, said, seconds: spent, done }]) {
  const lines = [...status.split("\n"), ...said].filter(Boolean);
  return make(
    "article",
    {},
    make("p", {}, goButton(id), ` ${seconds(spent)}${done ? "" : ", running"}`),
    terms(Object.entries(stages).map(([stage, time]) => [stage, seconds(time)])),
    lines.length > 0 && make("ul", {}, lines.map((line) => make("li", {}, line))),
  );
}

/** What each stage of a run used, beside its forecast from before the run. */
function costTable(costs, planned) {
  const stages = planned.flatMap((each) => each.stages ?? []);
  const foreseen = (name) => new Set(stages.filter(({ stage }) => stage === name).map(({ peak }) => bytes(peak)));
  const rows = costs.map(({ stage, mode, peak_bytes: peak, moved_bytes: moved, moving_seconds: moving, seconds: spent }) => {
    const copied = moved > 0 ? `${bytes(moved)} in ${seconds(moving)}` : "nothing";
    return [`${stage}, ${mode}`, [...foreseen(stage)].join(" or ") || "–", peak > 0 ? bytes(peak) : "–", copied, seconds(spent)];
  });
  return table(["stage, offload", "forecast", "peak", "moved", "took"], rows);
}

/** What the last sampling did otherwise than the one before it, by their receipts. */
function changeList({ before, headline, changes, missing }) {
  const rows = changes.map((change) => [change.subject, change.before, change.now]);
  return make(
    "section",
    { class: "anygpu-changes", "aria-label": "What changed" },
    make("h3", {}, "Since the sampling before"),
    make("p", {}, headline),
    table(["", "before", "now"], rows),
    make("p", { class: "anygpu-why" }, `Compared with ${before}.`, missing.length > 0 && ` No receipt records ${missing.join(", ")}.`),
  );
}

function latentCard(entry) {
  const recover = acting("Recover", async () => placeLoader(await ask("/latents/recover", { id: entry.id })));
  const prompt = entry.prompt && make("details", {}, make("summary", {}, "Prompt"), make("p", {}, entry.prompt));
  const picture = entry.picture && { src: api.apiURL(entry.picture), alt: `Rough preview of ${entry.title}`, loading: "lazy", onerror: ({ target }) => target.remove() };
  return kept(picture, entry.title, entry.text, prompt, recover);
}

/** Add a node that loads the recovered latents to the canvas; returns the message to show. */
function placeLoader({ node, widget, value, text }) {
  const made = node && window.LiteGraph.createNode(node);
  if (!made) return text;
  const { canvas } = app;
  canvas.graph.add(made);
  made.pos = [canvas.visible_area[0] + 120, canvas.visible_area[1] + 160];
  const chosen = made.widgets?.find(({ name }) => name === widget);
  if (chosen) {
    if (chosen.options?.values?.includes?.(value) === false) chosen.options.values.push(value);
    chosen.value = value;
  }
  canvas.selectNode(made, false);
  canvas.setDirty(true, true);
  return text;
}

/** Save a text as a file where the browser saves them. */
function save(name, text) {
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

/** This machine as a small file: shown as it will be, then saved by the browser. Nothing is sent. */
function fileToShare({ text, file, form }) {
  const saving = acting("Save the file", async () => {
    save(file, text);
    return `${file} is in your browser's downloads.`;
  });
  return make(
    "section",
    { class: "anygpu-share", "aria-label": "File to share" },
    make("p", {}, "This is the whole file. It has no paths, names, addresses or keys; look through it."),
    make("pre", { tabindex: 0, "aria-label": "The file" }, text),
    copyButton(text),
    saving,
    make("p", {}, "AnyGPU sends nothing. Paste it into the field Machine file of ", make("a", { href: form, target: "_blank", rel: "noreferrer" }, "this form"), " if you like."),
  );
}

/** Fill `element` with the tab; returns how to stop it, and to tell it of another graph. */
export function open(element) {
  style();
  const parts = {
    graph: part("This graph"),
    run: part("Last run", false),
    paused: part("Paused runs"),
    kept: part("Saved latents", false),
    machine: part("This machine", false),
  };
  const memory = make("div", {});
  const notice = make("div", {});
  const shared = make("div", {});
  const share = acting("Share this machine", async () => {
    share.lastChild.textContent = "Asking the device takes a few seconds.";
    fill(shared, fileToShare(await ask("/share", {})));
  });
  const pause = pauseButton();
  offer(pause, false);
  const again = acting("Run the probes again", async () => {
    again.lastChild.textContent = "Running the probes takes a few seconds.";
    const found = await ask("/probes", {});
    showMachine(found);
    await refreshGraph();
    return "All probes have run.";
  });
  let last = { prompt: "", nodes: {} };
  let forecasts = [];
  let families = []; // of the models in the graph
  let planned = []; // the forecasts at the start of the last run
  let timer = 0;
  let asked = 0; // the newest question of the graph

  const showMachine = (found) => {
    fill(memory, meters(found.memory));
    again.firstChild.textContent = found.asked ? "Run the probes again" : "Run the probes";
    const missing = Object.entries(found.limits).map(([name, each]) => `${name}: ${Object.keys(each).join(", ")}`);
    fill(
      notice,
      found.problem && trouble(found.problem),
      found.first_run &&
        folded(
          "first run",
          "No model is installed: what to download",
          make("pre", { tabindex: 0, "aria-label": "What to download" }, found.first_run),
          copyButton(found.first_run),
        ),
    );
    parts.machine.fill(
      make("p", {}, found.device),
      memory,
      lightList(found.lights),
      again,
      missing.length > 0 && make("details", {}, make("summary", {}, "Choices that this machine cannot run"), make("p", {}, missing.join("; "))),
      found.sections.map(section),
      share,
      shared,
    );
  };
  const showRun = () => {
    if (!isOpen(last.prompt)) return parts.run.fill(make("p", {}, "The last run was of another workflow."));
    const nodes = Object.entries(last.nodes);
    offer(pause, nodes.some(([, { done }]) => !done));
    parts.run.fill(last.changed && changeList(last.changed), costTable(last.costs ?? [], planned), nodes.length ? nodes.map(runCard) : make("p", {}, "Nothing has run from this window yet."));
  };
  const guarded = async (target, act) => {
    try {
      await act();
    } catch (error) {
      target.fill(trouble(error.message));
    }
  };
  const refreshGraph = (pressed) =>
    guarded(parts.graph, async () => {
      const mine = ++asked;
      const types = graphs().flatMap(({ _nodes }) => _nodes.map(({ type }) => type)).join();
      const ours = /AnyGPU|workflow/.test(types);
      if (ours && !pressed && ACTS.test(types)) return parts.graph.fill(make("p", {}, "Press Refresh: this graph records or draws."));
      const { output = {} } = ours ? await app.graphToPrompt() : {};
      const found = await ask("/graph", { prompt: output });
      if (mine !== asked) return;
      forecasts = found.forecasts;
      families = found.pipelines.map(({ family }) => family);
      const cards = found.recipes.map(({ node, ...it }) => [goButton(node), three(it)]);
      cards.push(...found.pipelines.map((card) => pipelineCard(card, forecasts)));
      parts.graph.fill(cards.length ? cards : make("p", {}, "This graph has no AnyGPU node that loads a model."));
    });
  const refreshKept = () =>
    guarded(parts.kept, async () => {
      const { latents } = await ask("/latents");
      const [fitting, others] = [true, false].map((fits) => latents.filter(({ family }) => families.includes(family) === fits));
      const rest = others.length > 0 && make("details", {}, make("summary", {}, `${others.length} of other models`), others.map(latentCard));
      const none = make("p", {}, latents.length ? "None of the models in this graph." : "There are none.");
      parts.kept.fill(fitting.length ? fitting.map(latentCard) : none, rest);
    });
  const refreshPaused = () =>
    guarded(parts.paused, async () => {
      const cards = await pausedCards(refreshPaused);
      parts.paused.element.hidden = !cards.length;
      parts.paused.fill(cards);
    });
  const refreshRun = () =>
    guarded(parts.run, async () => {
      const { prompt } = last;
      const found = await ask(`/run?client_id=${api.clientId}`);
      if (prompt !== last.prompt) return; // another began
      last = found;
      showRun();
    });
  const refreshRest = (pressed) => {
    void refreshRun();
    void refreshPaused();
    void refreshGraph(pressed).then(refreshKept); // what fits the graph comes first
  };

  const refresh = (pressed) => {
    void guarded(parts.machine, async () => showMachine(await ask("/machine")));
    refreshRest(pressed);
  };
  const later = (act) => {
    clearTimeout(timer);
    timer = setTimeout(act, SETTLED);
  };
  const onRun = ({ detail }) => {
    if (!isOpen(detail.prompt_id)) return;
    if (!last.nodes[detail.node]) void refreshPaused(); // a resumed one is gone
    last.nodes[detail.node] = detail.entry;
    follow(String(detail.node), detail.entry);
    fill(memory, meters(detail.memory));
    showRun();
  };
  const onStart = ({ detail }) => {
    if (!isOpen(detail.prompt_id)) return;
    last = { prompt: detail.prompt_id, nodes: {} };
    planned = forecasts;
    showRun();
  };
  const onEnd = () => {
    offer(pause, false);
    refreshRest();
  };
  const heard = [
    ["anygpu.run", onRun],
    ["execution_start", onStart],
    ["graphChanged", (changed = () => later(refreshGraph))],
    ...ENDS.map((kind) => [kind, onEnd]),
  ];
  for (const [kind, act] of heard) api.addEventListener(kind, act);

  element.replaceChildren(
    make(
      "div",
      { class: "anygpu anygpu-panel", role: "region", "aria-label": "AnyGPU" },
      make("header", {}, make("h1", {}, "AnyGPU"), button("Refresh", refresh)),
      notice,
      pause,
      Object.values(parts).map((each) => each.element),
    ),
  );
  refresh();
  const close = () => {
    asked = NaN; // equals none
    clearTimeout(timer);
    for (const [kind, act] of heard) api.removeEventListener(kind, act);
  };
  return { close, later: () => later(onEnd) };
}
