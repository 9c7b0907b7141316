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

/** Runs in the page: the serialised graph of one specification. */
function build(spec) {
  const { app, LiteGraph } = window;
  app.graph.clear();
  const made = {};
  for (const [key, node] of Object.entries(spec.nodes)) {
    const built = LiteGraph.createNode(node.kind);
    if (!built) throw new Error(`no node ${node.kind}`);
    app.graph.add(built);
    if (node.title) built.title = node.title;
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
  // Columns from left to right, each in its group; in each the nodes stand below one another.
  const [gap, edge, heading] = [50, 20, 50];
  let x = 0;
  for (const column of spec.columns) {
    const { group = "", nodes } = Array.isArray(column) ? { nodes: column } : column;
    let y = 0;
    let widest = 0;
    for (const { key, height = 0, width = 340 } of nodes) {
      const node = made[key];
      const [least, tall] = node.computeSize();
      node.setSize([Math.max(least, width), Math.max(tall, height)]);
      node.pos = [x, y];
      y += node.size[1] + LiteGraph.NODE_TITLE_HEIGHT + gap;
      widest = Math.max(widest, node.size[0]);
    }
    if (group) {
      const box = new LiteGraph.LGraphGroup(group);
      box.pos = [x - edge, -LiteGraph.NODE_TITLE_HEIGHT - heading];
      box.size = [widest + 2 * edge, y - gap + heading + edge];
      app.graph.add(box);
    }
    x += widest + 2 * edge + gap;
  }
  return app.graph.serialize();
}

await mkdir(FOLDER, { recursive: true });
for (const [name, spec] of Object.entries({ ...WORKFLOWS, ...PAINT_WORKFLOWS, ...CORE_WORKFLOWS, ...FIT_WORKFLOWS })) {
  if (only.length && !only.includes(name)) continue;
  // A new page each time: the frontend keeps widget values by node id, also for the nodes of a graph that is gone.
  const { browser, page, errors } = await openPage();
  try {
    const graph = await page.evaluate(build, spec);
    graph.id = fixedId(name);
    graph.revision = 0;
    graph.extra = { ds: { scale: 0.7, offset: [80, 180] } };
    await writeFile(new URL(`${name}.json`, FOLDER), `${JSON.stringify(graph, null, 1)}\n`);
    console.log(`${name}.json: ${graph.nodes.length} nodes`);
    if (errors.length) throw new Error(errors.join("\n"));
  } finally {
    await browser.close();
  }
}
