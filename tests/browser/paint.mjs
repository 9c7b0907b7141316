// The texturing workflows in ComfyUI's real frontend: run to a GLB that its 3D preview opens, looked at by what it draws.
// With --pictures the demo model paints, in its own time, and a screenshot of each goes into docs/images/.
import assert from "node:assert/strict";
import { mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { URL_OF_SERVER, loadWorkflow, openPage, showAll } from "./comfy.mjs";
import { chosenModes } from "./reporting.mjs";
import { ended, queue, shrinkPainting, source } from "./running.mjs";
import { shoot } from "./tidy.mjs";

const IMAGES = new URL("../../docs/images/", import.meta.url);
const PICTURES = process.argv.includes("--pictures");
const named = process.argv.slice(2).filter((word) => !word.startsWith("--"));
const names = named.length ? named : ["anygpu_paint_v2_0"];
// Without a graphics card the 3D preview draws through Chromium's own software.
const SOFTWARE = ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"];
const SHAPE = ["ImageOnlyCheckpointLoader", "ModelSamplingAuraFlow", "CLIPVisionEncode", "Hunyuan3Dv2Conditioning"];
SHAPE.push("EmptyLatentHunyuan3Dv2", "KSampler", "VAEDecodeHunyuan3D");

/** A ball in place of what core's shape model makes, which has no tiny form; nothing where a workflow has none. */
async function standIn(page) {
  await page.evaluate((kinds) => {
    const graph = window.app.graph;
    const decode = graph._nodes.find((node) => node.type === "VAEDecodeHunyuan3D");
    if (!decode) return;
    const ball = window.LiteGraph.createNode("StandInVoxels");
    ball.pos = [...decode.pos];
    graph.add(ball);
    for (const id of [...decode.outputs[0].links]) {
      const { target_id: target, target_slot: slot } = graph.getLink(id);
      ball.connect(0, graph.getNodeById(target), slot);
    }
    for (const node of graph._nodes.filter((each) => kinds.includes(each.type))) graph.remove(node);
  }, SHAPE);
}

/** How many different colours the 3D preview shows: of all canvases that are no graph, that with most; 1 is an empty one. */
async function coloursShown(page) {
  return page.evaluate(async () => {
    const shown = [0];
    for (const canvas of document.querySelectorAll("canvas:not(.lgraphcanvas)")) {
      const copy = document.createElement("canvas");
      [copy.width, copy.height] = [128, 128];
      const context = copy.getContext("2d");
      await new Promise(requestAnimationFrame);
      context.drawImage(canvas, 0, 0, 128, 128);
      const data = context.getImageData(0, 0, 128, 128).data;
      const seen = new Set();
      for (let at = 0; at < data.length; at += 4) seen.add(`${data[at] >> 4},${data[at + 1] >> 4},${data[at + 2] >> 4}`);
      shown.push(seen.size);
    }
    return Math.max(...shown);
  });
}

/** The button on Load Mesh: a file of the user's is kept among ComfyUI's inputs, and chosen. */
async function uploads(page) {
  await page.evaluate(() => {
    window.app.graph.clear();
    window.app.graph.add(window.LiteGraph.createNode("AnyGPULoadMesh"));
  });
  const press = () =>
    page.evaluate(() => {
      const [node] = window.app.graph._nodes;
      node.widgets.find((each) => each.type === "button").callback();
    });
  const chosen = () =>
    page.evaluate(() => {
      const [node] = window.app.graph._nodes;
      return { value: node.widgets[0].value, saved: node.serialize().widgets_values };
    });
  const choose = async (...names) => {
    const asked = page.waitForEvent("filechooser");
    await press();
    const buffer = Buffer.from("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n");
    await (await asked).setFiles(names.map((name) => ({ name, mimeType: "text/plain", buffer })));
  };
  const kept = page.waitForResponse((answer) => answer.url().endsWith("/upload/image"));
  await choose("mine.obj");
  assert.equal((await kept).status(), 200);
  await page.waitForFunction(() => window.app.graph._nodes[0].widgets[0].value === "3d/mine.obj");
  assert.deepEqual((await chosen()).saved, ["3d/mine.obj"], "a workflow holds the file's name alone");
  await choose("words.txt");
  await page.waitForFunction(() => document.body.innerText.includes("no mesh in 3d/words.txt"));
  assert.equal((await chosen()).value, "3d/mine.obj");
  await choose("mine.bin", "mine.obj");
  await page.waitForFunction(() => /^3d\/\d+\/mine\.obj$/.test(window.app.graph._nodes[0].widgets[0].value));
}

if (!named.length) {
  const { browser, page, errors } = await openPage();
  try {
    await uploads(page);
    assert.deepEqual(errors, [], "the page reported errors");
    console.log("ok  Load Mesh uploads a file and chooses it");
  } finally {
    await browser.close();
  }
}

const runs = names.flatMap((name) => (PICTURES ? [false] : chosenModes()).map((nodes2) => [name, nodes2]));
for (const [name, nodes2] of runs) {
  // Under --disable-api-nodes ComfyUI forbids its own preview to read a GLB's texture; the tests' server has that flag.
  const { browser, page, errors } = await openPage({ nodes2, args: SOFTWARE, width: 2560, height: 1300, bypassCSP: true });
  try {
    await loadWorkflow(page, await source(name), name);
    await showAll(page);
    await standIn(page);
    if (!PICTURES) await shrinkPainting(page);
    // Without what earlier runs left, every node runs and shows its pictures.
    await fetch(`${URL_OF_SERVER}/free`, { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) });
    await queue(page);
    const seen = await ended(page, 400000);
    assert.equal(seen.ending, "execution_success", seen.message);
    assert.ok(seen.previews > 0, "no preview of the views");
    const patience = Date.now() + 60000; // in which the model is fetched and drawn
    let colours = await coloursShown(page);
    for (; colours <= 8 && Date.now() < patience; colours = await coloursShown(page)) await page.waitForTimeout(500);
    await shoot(page, nodes2, name, "painted");
    if (PICTURES) {
      await mkdir(IMAGES, { recursive: true });
      await page.screenshot({ path: fileURLToPath(new URL(`${name.replace("anygpu_", "")}.png`, IMAGES)) });
    }
    assert.ok(colours > 8, `the 3D preview shows ${colours} colours`);
    assert.deepEqual(errors, [], "the page reported errors");
    console.log(`ok  ${nodes2 ? "Nodes 2.0" : "classic canvas"}: ${name}: a GLB in the 3D preview, ${colours} colours`);
  } finally {
    await browser.close();
  }
}
