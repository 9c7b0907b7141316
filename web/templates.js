// Titles, descriptions, tags and order of our templates: core lists a pack's by file name, so they join its own list.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const PACK = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2)); // the folder it is in

const EXAMPLES = ["example.png", "example.mp4"]; // of host/examples.py
const MARGIN = 10; // pixels around a graph
let stop = () => {}; // ends the first view
const LEGIBLE = 0.58; // below it the classic canvas draws no text

async function described(names) {
  try {
    const rows = await (await fetch(new URL("./templates.json", import.meta.url))).json();
    return rows.filter(({ name }) => names.includes(name)).map((row) => ({ ...row, mediaType: "image", mediaSubtype: "jpg" }));
  } catch {
    return [];
  }
}

/** The whole graph on what the canvas has free, no larger than life: the frontend leaves a quarter empty. */
function showWhole() {
  const { canvas, ds, graph } = app.canvas;
  const boxes = [...graph._nodes, ...graph._groups].map(({ boundingRect }) => boundingRect);
  if (!boxes.length) return;
  const [left, top] = [0, 1].map((side) => Math.min(...boxes.map((box) => box[side])));
  const [width, height] = [0, 1].map((side) => Math.max(...boxes.map((box) => box[side] + box[side + 2])) - [left, top][side]);
  const whole = canvas.getBoundingClientRect();
  const rect = (name) => document.querySelector(name)?.getBoundingClientRect();
  const free = rect(".graph-canvas-panel") ?? whole;
  const above = Math.min(free.top, rect(".actionbar-container")?.bottom ?? whole.bottom); // what is missing is said below it
  const tall = free.bottom - above - 2 * MARGIN;
  const scale = Math.min((free.width - 2 * MARGIN) / width, Math.max(tall / height, LEGIBLE), 1);
  const beside = (rect(".minimap-main-container")?.left ?? 0) - free.left;
  const room = width * scale + 2 * MARGIN > beside ? free.width : beside;
  ds.scale = scale;
  ds.offset[0] = (free.left - whole.left + (room - width * scale) / 2) / scale - left;
  ds.offset[1] = (above - whole.top + MARGIN + Math.max(0, (tall - height * scale) / 2)) / scale - top;
  app.canvas.setDirty(true, true);
}

/** Offer to draw the examples that are not in the input folder. */
async function offerExamples() {
  const all = app.graph._nodes.flatMap((node) => (node.widgets ?? []).map((widget) => [node, widget]));
  const chosen = all.filter(([, { value, options }]) => EXAMPLES.includes(value) && !options?.values?.includes?.(value));
  const missing = [...new Set(chosen.map(([, { value }]) => value))];
  const message = `ComfyUI's input folder has no ${missing.join(" and ")}. Draw a red circle on blue there, to try this template with?`;
  if (!missing.length || !(await app.extensionManager.dialog.confirm({ title: "Example files", message }))) return;
  const { ask } = await import("./ask.mjs");
  try {
    await ask("/examples", {});
    await app.refreshComboInNodes();
    for (const [node, widget] of chosen) {
      widget.callback?.(widget.value); // shows it
      node.onWidgetChanged?.(widget.name, widget.value, "", widget); // and it counts as there
    }
  } catch ({ message: detail }) {
    app.extensionManager.toast.add({ severity: "error", summary: "Example files", detail });
  }
}

app.registerExtension({
  name: "anygpu.templates",
  beforeConfigureGraph() {
    stop();
  },
  /** A template of ours opens legible; a saved copy opens where it was left. */
  afterConfigureGraph() {
    const { canvas, graph } = app.canvas;
    if (!graph.extra?.anygpu_first_view) return;
    delete graph.extra.anygpu_first_view;
    void offerExamples();
    let left = 20; // the frontend makes its own view in the first second
    const timer = setInterval(() => {
      if (!canvas.clientWidth) return; // App mode
      if (!left-- || Object.keys(app.canvas.selected_nodes).length) stop();
      else showWhole();
    }, 100);
    stop = () => clearInterval(timer);
    for (const event of ["pointerdown", "wheel"]) canvas.addEventListener(event, stop, { once: true });
  },
  init() {
    const { getWorkflowTemplates, getCoreWorkflowTemplates } = api;
    if (!getWorkflowTemplates || !getCoreWorkflowTemplates) return;
    let ours = [];
    api.getWorkflowTemplates = async () => {
      const packs = await getWorkflowTemplates.call(api);
      ours = await described(packs[PACK] ?? []);
      if (!ours.length) return packs;
      const left = (names) => names.filter((name) => !ours.some((row) => row.name === name));
      return Object.fromEntries(Object.entries(packs).map(([pack, names]) => [pack, left(names)])); // a second copy of ours too
    };
    api.getCoreWorkflowTemplates = async (locale) => {
      const categories = await getCoreWorkflowTemplates.call(api, locale);
      const known = !ours.length || categories.some(({ moduleName }) => moduleName === PACK); // it asks itself where a language is missing
      return known ? categories : [...categories, { moduleName: PACK, title: "AnyGPU", templates: ours }];
    };
  },
});
