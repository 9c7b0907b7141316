// Writes subgraphs/*.json in ComfyUI's own frontend: one node that is a whole graph, offered in its node library.
import { createHash } from "node:crypto";
import { mkdir, writeFile } from "node:fs/promises";
import { openPage } from "./comfy.mjs";

const FOLDER = new URL("../../subgraphs/", import.meta.url);
const NAME = "Any model to video";

const SPEC = {
  name: NAME,
  category: "video/AnyGPU",
  description: "A prompt to a video with any AnyGPU model but FramePack: load, encode, sample, decode and save in one node.",
  nodes: {
    load: ["AnyGPULoadPipeline", [0, 0]],
    prompt: ["AnyGPUEncodePrompt", [460, 0]],
    sample: ["AnyGPUSample", [960, 0]],
    decode: ["AnyGPUDecode", [1400, 0]],
    save: ["SaveVideo", [1880, 0]], // or it would run only with a node behind it
  },
  links: [
    ["load", "pipeline", "prompt", "pipeline"],
    ["load", "pipeline", "sample", "pipeline"],
    ["load", "pipeline", "decode", "pipeline"],
    ["prompt", "prompt", "sample", "prompt"],
    ["sample", "latent", "decode", "latent"],
    ["decode", "video", "save", "video"],
  ],
  inputs: [
    ["load", "model"],
    ["prompt", "text"],
    ["prompt", "negative"],
    ["sample", "width"],
    ["sample", "height"],
    ["sample", "frames"],
    ["sample", "steps"],
    ["sample", "cfg"],
    ["sample", "seed"],
    ["load", "precision"],
    ["load", "offload"],
    ["sample", "image"],
  ],
  outputs: [
    ["decode", "video"],
    ["decode", "images"],
    ["sample", "latent"],
    ["load", "pipeline"],
  ],
};

/** Runs in the page: the blueprint of the specification. */
function build(spec) {
  const { app, LiteGraph } = window;
  app.graph.clear();
  const made = {};
  for (const [key, [type, place]] of Object.entries(spec.nodes)) {
    made[key] = LiteGraph.createNode(type);
    app.graph.add(made[key]);
    made[key].pos = [...place];
  }
  made.load.widgets.find(({ name }) => name === "model").value = "LTX-Video"; // the smallest, on every machine the same
  const slot = (list, name) => list.findIndex((each) => each.name === name);
  for (const [from, output, to, input] of spec.links) {
    made[from].connect(slot(made[from].outputs, output), made[to], slot(made[to].inputs, input));
  }
  const { subgraph, node } = app.graph.convertToSubgraph(new Set(Object.values(made)));
  const inside = Object.fromEntries(Object.entries(spec.nodes).map(([key, [type]]) => [key, subgraph.nodes.find((each) => each.type === type)]));
  for (const old of [...subgraph.inputs]) subgraph.removeInput(old);
  for (const old of [...subgraph.outputs]) subgraph.removeOutput(old);
  for (const [key, name] of spec.inputs) {
    const input = inside[key].inputs[slot(inside[key].inputs, name)];
    if (!input) throw new Error(`no input ${name} on ${key}`);
    subgraph.addInput(name, String(input.type)).connect(input, inside[key]);
  }
  for (const [key, name] of spec.outputs) {
    const output = inside[key].outputs[slot(inside[key].outputs, name)];
    subgraph.addOutput(name, String(output.type)).connect(output, inside[key]);
  }
  subgraph.name = spec.name;
  node.title = spec.name;
  node.setSize([420, node.computeSize()[1]]);
  const graph = app.graph.serialize();
  const definition = graph.definitions.subgraphs[0];
  Object.assign(definition, { category: spec.category, description: spec.description });
  return graph;
}

/** The same text each time: ids that follow from the name in place of random ones. */
function fixed(graph) {
  let text = JSON.stringify(graph, null, 1);
  const ids = [...new Set(text.match(/[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/g))];
  ids.forEach((id, index) => {
    const hex = createHash("sha256").update(`${NAME} ${index}`).digest("hex");
    const own = `${hex.slice(0, 8)}-${hex.slice(8, 12)}-4${hex.slice(13, 16)}-8${hex.slice(17, 20)}-${hex.slice(20, 32)}`;
    text = text.replaceAll(id, own);
  });
  return `${text}\n`;
}

await mkdir(FOLDER, { recursive: true });
const { browser, page, errors } = await openPage();
try {
  const graph = await page.evaluate(build, SPEC);
  if (errors.length) throw new Error(errors.join("\n"));
  await writeFile(new URL(`${NAME}.json`, FOLDER), fixed(graph));
  console.log(`${NAME}.json: ${graph.definitions.subgraphs[0].nodes.length} nodes inside`);
} finally {
  await browser.close();
}
