// Writes workflows/*.json: builds each workflow of workflows.spec.mjs in ComfyUI's own frontend and saves its graph.
import { createHash } from "node:crypto";
import { mkdir, writeFile } from "node:fs/promises";
import { openPage } from "./comfy.mjs";
import { CORE_WORKFLOWS } from "./core.spec.mjs";
import { FIT_WORKFLOWS } from "./fit.spec.mjs";
import { PAINT_WORKFLOWS } from "./paint.spec.mjs";
import { WORKFLOWS } from "./workflows.spec.mjs";

const FOLDER = new URL("../../workflows/", import.meta.url);
const only = process.argv.slice(2);

/** An id that is the same each time the workflow is made. */
function fixedId(name) {
  const hex = createHash("sha256").update(name).digest("hex");
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-4${hex.slice(13, 16)}-8${hex.slice(17, 20)}-${hex.slice(20, 32)}`;
}

// What App mode shows of a graph, in this order: the inputs [node, widget] that are there, and the outputs.
const APP_INPUTS = [
  ["image", "image"], ["first", "image"], ["last", "image"], ["who", "image"], ["picture", "image"], ["clip", "file"],
  ["motion", "file"], ["mesh", "mesh_file"], ["recover", "kept"], ["latent", "kept"], ["prompt", "text"], ["prompt", "prompt"],
  ["positive", "text"], ["encoded", "width"], ["encoded", "height"], ["empty", "width"], ["empty", "height"], ["empty", "length"],
  ["scene", "width"], ["scene", "height"], ["scene", "length"], ["sample", "width"], ["sample", "height"], ["sample", "frames"],
  ["sample", "clip_seconds"], ["prompt", "width"], ["prompt", "height"], ["prompt", "length"], ["sample", "seed"],
  ["noise", "noise_seed"], ["paint", "seed"], ["texture", "seed"],
];
const APP_OUTPUTS = ["save", "look"];
const APPS = ["anygpu_ltx_text_to_video", "anygpu_framepack_image_to_video"]; // once more, as files that open in App mode

/** Runs in the page: the serialised graph of one specification. */
function build([spec, appInputs, appOutputs]) {
  const { app, LiteGraph } = window;
  app.graph.clear();
  const made = {};
  for (const [key, node] of Object.entries(spec.nodes)) {
    const built = LiteGraph.createNode(node.kind);
    if (!built) throw new Error(`no node ${node.kind}`);
    app.graph.add(built);
    if (node.title) built.title = node.title;
    if (node.kind === "MarkdownNote") built.bgcolor = built.color; // on its own brown Nodes 2.0 writes in a contrast of 2.8
    if (node.models) built.properties.models = node.models; // for core's dialog of missing models
    for (const [name, value] of Object.entries(node.values ?? {})) {
      const widget = built.widgets?.find((candidate) => candidate.name === name);
      if (!widget) throw new Error(`${node.kind} has no widget ${name}: ${built.widgets?.map((w) => w.name)}`);
      widget.value = value;
      widget.callback?.(value, app.canvas, built, built.pos, {});
    }
    made[key] = built;
  }
  for (const [key, node] of Object.entries(spec.nodes)) {
    for (const [name, [from, output]] of Object.entries(node.links ?? {})) {
      const source = made[from];
      const slot = source.outputs.findIndex((candidate) => candidate.name === output);
      const target = made[key].inputs.findIndex((candidate) => candidate.name === name);
      if (slot < 0 || target < 0) throw new Error(`no way from ${from}.${output} to ${key}.${name}`);
      source.connect(slot, made[key], target);
    }
  }
  // Lanes from left to right: groups, in each the nodes, stand below one another as long as a lane is no taller than a
  // small screen shows in letters of 8 pixels; then the next lane begins. A group that is taller goes on beside itself.
  const [gap, edge, heading, title] = [20, 15, 40, LiteGraph.NODE_TITLE_HEIGHT];
  const { tallest = 1110 } = spec;
  const lanes = [];
  for (const column of spec.columns) {
    const { group = "", nodes } = Array.isArray(column) ? { nodes: column } : column;
    const rows = [[]];
    const room = tallest - (group ? heading + edge : 0);
    for (const { key, height = 0, width = 340, begins = height } of nodes) {
      const [least, tall] = made[key].computeSize();
      const most = (pixels) => Math.max(tall + 10, pixels); // Nodes 2.0 is a little taller
      const node = { node: made[key], width: Math.max(least, width), height: most(height), begins: most(begins) };
      const filled = [...rows.at(-1), node].reduce((sum, { height }) => sum + height + title + gap, -gap);
      if (filled > room && rows.at(-1).length) rows.push([node]);
      else rows.at(-1).push(node);
    }
    const heights = rows.map((row) => row.reduce((sum, { height }) => sum + height + title + gap, -gap));
    const box = { group, rows, height: Math.max(...heights) + (group ? heading + edge : 0) };
    const lane = lanes.at(-1);
    const filled = lane?.reduce((sum, { height }) => sum + height + gap, box.height);
    if (lane && filled <= tallest && rows.length === 1 && lane.every((above) => above.rows.length === 1)) lane.push(box);
    else lanes.push([box]);
  }
  let x = 0;
  for (const lane of lanes) {
    let y = 0;
    let right = x;
    for (const { group, rows, height } of lane) {
      let left = x;
      for (const row of rows) {
        let top = y + (group ? heading : 0) + title;
        for (const { node, width, height, begins } of row) {
          node.setSize([width, begins]);
          node.pos = [left, top];
          top += height + title + gap;
        }
        left += Math.max(...row.map(({ width }) => width)) + gap;
      }
      if (group) {
        const box = new LiteGraph.LGraphGroup(group);
        box.pos = [x - edge, y];
        box.size = [left - gap - x + 2 * edge, height];
        app.graph.add(box);
      }
      y += height + gap;
      right = Math.max(right, left - gap);
    }
    x = right + 2 * edge + gap;
  }
  const free = ([key, name]) =>
    made[key]?.widgets?.some((widget) => widget.name === name) && !made[key].inputs?.some((input) => input.widget?.name === name && input.link != null);
  const graph = app.graph.serialize();
  // The first is read and deleted by web/templates.js.
  graph.extra = {
    anygpu_first_view: true,
    ds: { scale: 0.7, offset: [80, 180] },
    linearData: {
      inputs: appInputs.filter(free).map(([key, name]) => [String(made[key].id), name]),
      outputs: appOutputs.filter((key) => key in made).map((key) => String(made[key].id)),
    },
  };
  return graph;
}

await mkdir(FOLDER, { recursive: true });
for (const [name, spec] of Object.entries({ ...WORKFLOWS, ...PAINT_WORKFLOWS, ...CORE_WORKFLOWS, ...FIT_WORKFLOWS })) {
  if (only.length && !only.includes(name)) continue;
  // A new page each time: the frontend keeps widget values by node id, also for the nodes of a graph that is gone.
  const { browser, page, errors } = await openPage();
  try {
    const graph = await page.evaluate(build, [spec, APP_INPUTS, APP_OUTPUTS]);
    graph.id = fixedId(name);
    graph.revision = 0;
    await writeFile(new URL(`${name}.json`, FOLDER), `${JSON.stringify(graph, null, 1)}\n`);
    if (APPS.includes(name)) {
      const app = { ...graph, id: fixedId(`${name}.app`), extra: { ...graph.extra, linearMode: true } };
      await writeFile(new URL(`${name}.app.json`, FOLDER), `${JSON.stringify(app, null, 1)}\n`);
    }
    console.log(`${name}.json: ${graph.nodes.length} nodes`);
    if (errors.length) throw new Error(errors.join("\n"));
  } finally {
    await browser.close();
  }
}
